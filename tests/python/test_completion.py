"""The completion scripts that `nvfp4-moe completion SHELL` prints, each run by its shell."""

import os
import pty
import re
import shutil
import subprocess

import pytest

# A command line up to the cursor, and the words that may complete its last word. None: the names of files.
CASES = [
    ("nvfp4-moe qu", ["quantize"]),
    ("nvfp4-moe --v", ["--version"]),
    ("nvfp4-moe quantize --sea", ["--search"]),
    ("nvfp4-moe quantize --search ", ["max", "mse", "sweep"]),
    ("nvfp4-moe quantize a b --search s", ["sweep"]),
    ("nvfp4-moe quantize --search=m", ["max", "mse"]),
    ("nvfp4-moe quantize --json --search m", ["max", "mse"]),
    ("nvfp4-moe inspect DIR --backend cpu:av", ["cpu:avx2", "cpu:avx512bf16", "cpu:avx512vnni"]),
    ("nvfp4-moe completion ", ["bash", "fish", "zsh"]),
    ("nvfp4-moe inspect ", None),
    ("nvfp4-moe inspect quantize --html ", None),
    ("nvfp4-moe quantize --layers ", []),
]
ZSH = """
autoload -Uz compinit; compinit -u -D; source ./script
bindkey '^I' complete-word
comppostfuncs=(finish)
finish() { print -r -- '<end>'; exit }
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
  typeset -a hits; builtin compadd -A hits "$@"
  for hit in $hits; do print -r -- "<hit>$hit<>"; done
  builtin compadd "$@"
}
"""


@pytest.fixture
def script(tool, tmp_path):
    """script(shell): writes the shell's script to the folder `tmp_path`, which also has a file."""

    def write(shell):
        if not shutil.which(shell):
            pytest.skip(f"{shell} is not installed")
        (tmp_path / "weights.safetensors").touch()
        printed = tool("completion", shell)
        assert (printed.returncode, printed.stderr) == (0, "")
        (tmp_path / "script").write_text(printed.stdout)

    return write


def run(folder, *command):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_bash(script, tmp_path):
    script("bash")
    assert run(tmp_path, "bash", "-c", "source ./script; complete -p nvfp4-moe").split() == (
        "complete -o default -F _nvfp4_moe nvfp4-moe".split()
    )
    for line, expected in CASES:
        # readline's words: it splits at = and : too
        words = [part for word in line.split(" ") for part in re.split("([=:])", word) if part or not word]
        before = f"source ./script; COMP_WORDS=({' '.join(word or repr(word) for word in words)}); "
        shown = run(
            tmp_path, "bash", "-c", before + "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _nvfp4_moe; echo ${COMPREPLY[*]}"
        )
        assert sorted(shown.split()) == [word.split(":")[-1] for word in expected or []], line


def test_fish(script, tmp_path):
    script("fish")
    for line, expected in CASES:
        shown = run(tmp_path, "fish", "--no-config", "-c", f"source ./script; complete -C '{line}'")
        words = sorted(word.split("\t")[0].split("=")[-1] for word in shown.splitlines())
        assert words == expected if expected is not None else "weights.safetensors" in words, line


def test_zsh(script, tmp_path):
    script("zsh")
    (tmp_path / ".zshrc").write_text(ZSH)
    for line, expected in CASES:
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(tmp_path)
            os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})
        os.write(terminal, (line + "\t").encode())
        shown = ""
        while "<end>" not in shown:
            shown += os.read(terminal, 4096).decode()
        os.close(terminal)
        os.waitpid(child, 0)
        words = sorted(re.findall("<hit>(.*?)<>", shown))
        assert words == expected if expected is not None else "weights.safetensors" in words, line
