"""The environment's SGLang on a CPU or a GPU, with this package's plugin as if it were installed."""

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import nvfp4_moe
import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]

# The kernels of SGLang's routers run in Triton's interpreter in this process. Triton reads it when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(HERE.parent / "common"))  # models, truth
sys.path.insert(0, str(ROOT / "tests/python"))  # moe_reference: the layer in float64, as intervals
sys.path.append(str(HERE / "stubs"))  # after the real ones, if they are installed
sys.path.append(str(HERE.parent))

import install  # noqa: E402
from processes import Process  # noqa: E402


def pytest_ignore_collect(collection_path):
    """The stand-ins contain no tests."""
    return (HERE / "stubs") in collection_path.parents or None


def pytest_collection_modifyitems(items):
    missing = [name for name in ("sglang", "torch", "transformers") if importlib.util.find_spec(name) is None]
    for item in items if missing else []:
        item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} not installed: python/requirements-sglang.txt"))


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory):
    """Makes a folder with the entry points of pyproject.toml, as in an installed wheel, and those of record.py."""
    folder = tmp_path_factory.mktemp("metadata")
    recorder = "[sglang.srt.plugins]\nrecord = record:register\n"
    for name, points in (("nvfp4-moe", install.entry_points()), ("nvfp4-moe-record", recorder)):
        info = folder / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        info.joinpath("entry_points.txt").write_text(points)
    return folder


# ---- SGLang in this process


@pytest.fixture(scope="module")
def sglang(plugin_path):
    """SGLang with its plugins loaded from pyproject.toml's entry points, so that the name there is tested too."""
    # Layers are compared with the library's in bf16, unless a test sets another format.
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "NVFP4_MOE_THREADS": "1", "NVFP4_MOE_ACTIVATIONS": "bf16"}
    os.environ["NVFP4_MOE_ROUTER"] = "own"
    sys.path.insert(0, str(plugin_path))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    load_plugins()  # SGLang calls it in many places
    from sglang.srt import runtime_context

    yield runtime_context
    sys.path.remove(str(plugin_path))


@pytest.fixture
def configured(sglang):
    """configured(**arguments of the server): sets the arguments for new layers, as if a user had given them."""
    with contextlib.ExitStack() as stack:
        made = []

        def configure(**arguments):
            made.append(stack.enter_context(sglang.get_context().override_server_args(device="cpu", **arguments)))
            if (raw := getattr(made[-1], "_raw_input", None)) is not None:
                made[-1]._raw_input = {**raw, **arguments}  # as if a user had set it, not SGLang
            from sglang.srt.layers.moe.utils import initialize_moe_config

            initialize_moe_config()
            return made[-1]

        yield configure
        stack.close()
        flags = sglang.get_flags().moe
        flags.runner_backend = flags.a2a_backend = None


@pytest.fixture
def refusals():
    """The module, before it has logged anything."""
    from nvfp4_moe.sglang import refusals

    refusals._said.clear()
    return refusals


# ---- SGLang's engine in a process of its own

CPU = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NVFP4_MOE_THREADS": "1"}


@pytest.fixture(scope="session")
def environment(plugin_path):
    """Variables of a process that runs SGLang and finds the plugin; more come as keywords, None takes one away."""

    import torch

    on_gpu = torch.cuda.is_available()

    def make(**variables):
        package = pathlib.Path(nvfp4_moe.__file__).parents[1]
        stubs = [] if on_gpu else [str(HERE / "stubs")]
        paths = [str(package), *stubs, str(HERE), str(plugin_path), os.environ.get("PYTHONPATH", "")]
        env = dict(os.environ, PYTHONPATH=":".join(filter(None, paths)), HF_HUB_OFFLINE="1")
        env |= {"TOKENIZERS_PARALLELISM": "false"} | ({} if on_gpu else CPU)
        for name in ("NVFP4_MOE_MODE", "NVFP4_MOE_ROUTER", "SGLANG_PLUGINS", "TRITON_INTERPRET"):
            env.pop(name, None)
        env["NVFP4_MOE_ACTIVATIONS"] = "bf16"  # the bounds are made for it; None removes it
        for name, value in variables.items():
            env.pop(name, None) if value is None else env.update({name: value})
        return env

    return make


@pytest.fixture(scope="session")
def serve(environment, tmp_path_factory):
    """serve(model, reload=None, record=True, variables={}, **arguments of Engine) -> (rounds or None, exit status,
    log).

    record: whether to record the routers' decisions, which a captured graph cannot do.
    """

    def run(model, *, reload=None, record=True, variables=None, **arguments):
        folder = tmp_path_factory.mktemp(f"serve-{pathlib.Path(model).name}-")
        job = {"model": str(model), "arguments": arguments} | ({"reload": str(reload)} if reload else {})
        (folder / "job.json").write_text(json.dumps(job))
        env = environment(NVFP4_RECORD=str(folder / "routers") if record else None, **(variables or {}))
        result = folder / "result.json"
        process = Process(HERE / "serve.py", folder / "job.json", result, env=env, folder=folder, cwd=folder)
        status = process.wait(300)
        return (json.loads(result.read_text())["rounds"] if result.exists() else None), status, process.log

    return run


@pytest.fixture(scope="module")
def served(request, serve, checkpoints):
    """served(job) -> (rounds, log), for the module's JOBS {name: (checkpoint, arguments of serve)}. The first call
    starts all jobs; an engine has three processes."""
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3))
    started = {}

    def start(form, options):
        reload = {"reload": checkpoints[options["reload"]]} if "reload" in options else {}
        return pool.submit(serve, checkpoints[form], **(options | reload))

    def result(job, fails=False):
        if not started:
            started.update({name: start(*what) for name, what in request.module.JOBS.items()})
        rounds, status, log = started[job].result()
        assert fails or rounds, f"{job} ended with {status}:\n{log[-3000:]}"
        return rounds, log

    yield result
    pool.shutdown(cancel_futures=True)
