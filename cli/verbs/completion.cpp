// completion: prints a completion script for bash, zsh or fish, made from the parser's own verbs
// and options. The scripts complete verbs, options, the values of an option that has a fixed list,
// and file names.
#include <fmt/format.h>

#include "cli/console/console.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace cli {
namespace {

enum class Shell : uint8_t { kBash, kZsh, kFish };

enum class Takes : uint8_t { kNothing, kText, kFile, kDirectory, kOneOf };

struct Argument {
  std::string name;  // "--search"; a positional's has no dashes
  std::string help;
  Takes takes = Takes::kNothing;
  std::vector<std::string> values;  // of kOneOf
  bool positional() const { return name[0] != '-'; }
  std::string list() const { return fmt::format("{}", fmt::join(values, " ")); }
};

struct VerbArguments {
  std::string name, help;
  std::vector<Argument> arguments;
};

std::vector<std::string> split(const std::string& text, const std::string& by) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(by, begin)) != std::string::npos; begin = end + by.size())
    parts.push_back(text.substr(begin, end - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

Argument argument_of(const CLI::Option& option) {
  Argument argument{option.get_single_name(), option.get_description(), Takes::kText, {}};
  if (option.nonpositional()) argument.name = "--" + option.get_lnames().front();
  const std::string type = split(option.get_type_name(), ":").front();
  if (argument.name == "--backend") {
    argument.takes = Takes::kOneOf;
    argument.values = split(backend_names(), ", ");
  } else if (option.get_expected_max() == 0) {
    argument.takes = Takes::kNothing;
  } else if (type.find('|') != std::string::npos) {
    argument.takes = Takes::kOneOf;
    argument.values = split(option.get_type_name(), "|");
    for (std::string& value : argument.values)
      if (value.ends_with(":N")) value.back() = '0';  // cuda:N
  } else if (type == kDirectory) {
    argument.takes = Takes::kDirectory;
  } else if (type == kFile || argument.positional()) {
    argument.takes = Takes::kFile;
  }
  return argument;
}

std::vector<VerbArguments> verbs_of(const CLI::App& app) {
  std::vector<VerbArguments> verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    VerbArguments& one = verbs.emplace_back();
    one.name = verb->get_name();
    one.help = verb->get_description();
    for (const CLI::Option* option : verb->get_options())
      one.arguments.push_back(argument_of(*option));
  }
  return verbs;
}

// With a backslash before each of `special`.
std::string escaped(const std::string& text, std::string_view special) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

std::string filled(std::string script,
                   const std::vector<std::pair<std::string, std::string>>& marks) {
  for (const auto& [mark, text] : marks) script.replace(script.find(mark), mark.size(), text);
  return script;
}

// `-o default`: bash completes file names if the function finds no words.
constexpr const char* kBash = R"(# bash completion, printed by `nvfp4-moe completion bash`
_nvfp4_moe() {
  local words=() word current option= list=
  for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do  # bash has split words at = and : too
    if [[ ${#words[@]} -gt 2 && ($word == [=:]* || ${words[-1]} == *[=:]) ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
  done
  current=${words[-1]}
  if ((${#words[@]} > 2)); then
    option=${words[-2]}
    [[ $current != --*=* ]] || option=${current%%=*} current=${current#*=}
    case "${words[1]} $option" in
VALUES
      *)
        case "${words[1]} ${current:0:1}" in
OPTIONS
        esac ;;
    esac
  else
    list='VERBS'
  fi
  mapfile -t COMPREPLY < <(compgen -W "$list" -- "$current")
  # Readline keeps what is before the last colon.
  [[ $current != *:* || $COMP_WORDBREAKS != *:* ]] ||
    COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*:}"}"}")
}
complete -o default -F _nvfp4_moe nvfp4-moe
)";

std::string bash_script(const std::vector<VerbArguments>& verbs) {
  std::string values, options, names;
  for (const VerbArguments& verb : verbs) {
    std::string own;
    for (const Argument& argument : verb.arguments) {
      const auto add = [&](const std::string& action) {
        values += fmt::format("      '{} {}') {} ;;\n", verb.name, argument.name, action);
      };
      if (argument.positional()) {
        if (argument.takes == Takes::kOneOf)
          options += fmt::format("          '{} '[!-]*|'{} ') list='{}' ;;\n", verb.name, verb.name,
                                 argument.list());
        continue;
      }
      own += " " + argument.name;
      if (argument.takes == Takes::kOneOf) add(fmt::format("list='{}'", argument.list()));
      if (argument.takes == Takes::kText) add("compopt +o default 2>/dev/null; return");
      if (argument.takes == Takes::kDirectory)
        add("compopt +o default -o dirnames 2>/dev/null; return");
      if (argument.takes == Takes::kFile) add("return");
    }
    options += fmt::format("          '{} -') list='{}' ;;\n", verb.name, own);
    names += verb.name + " ";
  }
  names += "--help --version";
  return filled(kBash, {{"VALUES\n", values}, {"OPTIONS\n", options}, {"VERBS", names}});
}

constexpr const char* kZsh = R"(#compdef nvfp4-moe
# zsh completion, printed by `nvfp4-moe completion zsh`
_nvfp4-moe() {
  local line state
  _arguments -C '--help[Print help]' '--version[Print the version]' \
    '1:verb:->verb' '*::argument:->argument'
  case $state in
    verb)
      local -a verbs=(
VERBS
      )
      _describe verb verbs ;;
    argument)
      case $words[1] in
ARGUMENTS
      esac ;;
  esac
}
if [[ $funcstack[1] == _nvfp4-moe ]]; then _nvfp4-moe "$@"; else compdef _nvfp4-moe nvfp4-moe; fi
)";

std::string zsh_script(const std::vector<VerbArguments>& verbs) {
  const auto quoted = [](const std::string& text) {
    return fmt::format("'{}'", fmt::join(split(text, "'"), "'\\''"));
  };
  std::string names, arguments;
  for (const VerbArguments& verb : verbs) {
    names += "        " + quoted(verb.name + ":" + verb.help) + "\n";
    arguments += fmt::format("        {}) _arguments", verb.name);
    for (const Argument& argument : verb.arguments) {
      std::string value = ":value: ";
      if (argument.takes == Takes::kFile) value = ":file:_files";
      if (argument.takes == Takes::kDirectory) value = ":directory:_files -/";
      if (argument.takes == Takes::kOneOf) value = ":value:(" + escaped(argument.list(), ":") + ")";
      if (argument.takes == Takes::kNothing) value.clear();
      const std::string option =
          fmt::format("{}{}[{}]", argument.name, argument.takes == Takes::kNothing ? "" : "=",
                      escaped(argument.help, "[]"));
      arguments += " \\\n          " + quoted((argument.positional() ? "" : option) + value);
    }
    arguments += " ;;\n";
  }
  return filled(kZsh, {{"VERBS\n", names}, {"ARGUMENTS\n", arguments}});
}

std::string fish_script(const std::vector<VerbArguments>& verbs) {
  const std::string begin = "complete -c nvfp4-moe";
  std::string out = "# fish completion, printed by `nvfp4-moe completion fish`\n" + begin + " -f\n";
  const auto text = [](const std::string& plain) { return "'" + escaped(plain, "'\\") + "'"; };
  const std::string no_verb = " -n 'test (count (commandline -opc)) -eq 1'";
  out += begin + no_verb + " -l help -d 'Print help'\n";
  out += begin + no_verb + " -l version -d 'Print the version'\n";
  for (const VerbArguments& verb : verbs) {
    out += begin + no_verb + " -a " + verb.name + " -d " + text(verb.help) + "\n";
    const std::string in_verb =
        fmt::format("{} -n 'string match -q -- {} (commandline -opc)[2]'", begin, verb.name);
    for (const Argument& argument : verb.arguments) {
      std::string takes;
      if (argument.takes == Takes::kText) takes = " -x";
      if (argument.takes == Takes::kFile) takes = argument.positional() ? " -F" : " -r -F";
      if (argument.takes == Takes::kDirectory) takes = " -x -a '(__fish_complete_directories)'";
      if (argument.takes == Takes::kOneOf)
        takes = (argument.positional() ? " -a " : " -x -a ") + text(argument.list());
      out += in_verb + (argument.positional() ? "" : " -l " + argument.name.substr(2)) + takes +
             " -d " + text(argument.help) + "\n";
    }
  }
  return out;
}

}  // namespace
}  // namespace cli

template <>
struct EnumNames<cli::Shell> {
  static constexpr const char* kWhat = "SHELL";
  static constexpr std::array kAll = {"bash", "zsh", "fish"};
};

namespace cli {

void add_completion(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("completion",
                                      "Print a script that completes this tool's words in a shell");
  const auto name = std::make_shared<std::string>();
  verb->add_option("SHELL", *name, "The shell: bash, zsh or fish")
      ->required()
      ->type_name(choice_of<Shell>());
  verb->callback([&app, name] {
    const Result<Shell> shell = parse<Shell>(*name);
    if (!shell.ok()) throw CLI::ValidationError(shell.status().message());
    const std::vector<VerbArguments> verbs = verbs_of(app);
    print(*shell == Shell::kBash  ? bash_script(verbs)
          : *shell == Shell::kZsh ? zsh_script(verbs)
                                  : fish_script(verbs));
  });
}

}  // namespace cli
}  // namespace nvfp4_moe::internal
