"""Runs the emulator from Python: loads and launches PTX texts through its CUDA interface, with numpy arrays."""

import contextlib
import ctypes
import os
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The folder of libptxemu.so: ptxemu's own build, or the build of the surrounding project.
BUILD = pathlib.Path(os.environ.get("PTXEMU_BUILD", ROOT.parent / "build" / "cpu"))
LIBRARIES = {}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        [(f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"]
        + [("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
           ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]
    )  # fmt: skip


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, then 64 bytes of value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


ORDERS = ("at-once", "random", "late")
CLUSTER_DIMENSION, PROGRAMMATIC = 4, 6
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class LaunchError(Exception):
    """A launch that failed. The message is the emulator's report."""


def library(planted=False):
    """The run time; `planted` is the one that can be given faults."""
    if planted not in LIBRARIES:
        loaded = ctypes.CDLL(str(BUILD / f"libptxemu{'_planted' if planted else ''}.so"), mode=ctypes.RTLD_GLOBAL)
        loaded.ptxemu_last_report.restype = ctypes.c_char_p
        loaded.ptxemu_plant.restype = ctypes.c_bool
        loaded.cudaGetErrorString.restype = ctypes.c_char_p
        LIBRARIES[planted] = loaded
    return LIBRARIES[planted]


class Emulator:
    """One device. All calls are checked; a launch that fails raises LaunchError with the report."""

    def __init__(self, planted=False):
        self.cuda = library(planted)

    def check(self, error):
        if error == 0:
            return
        report = self.cuda.ptxemu_last_report().decode()
        text = self.cuda.cudaGetErrorString(error).decode()
        self.cuda.cudaDeviceReset()
        raise LaunchError(f"error {error} ({text}): {report}")

    @contextlib.contextmanager
    def order(self, name, seed=1):
        """Launches in this order of asynchronous work: at-once, random or late."""
        os.environ.update(PTXEMU_ORDER=name, PTXEMU_SEED=str(seed))
        try:
            yield
        finally:
            os.environ["PTXEMU_ORDER"] = "at-once"

    @contextlib.contextmanager
    def checked(self, what="order"):
        """Launches under the checker of order."""
        os.environ["PTXEMU_CHECK"] = what
        try:
            yield
        finally:
            os.environ["PTXEMU_CHECK"] = ""

    def kernel(self, ptx, name):
        """A kernel of a PTX text. The device becomes one that its target is for."""
        if target := re.search(r"^\.target sm_(\d+)", ptx, re.M):
            os.environ["PTXEMU_CC"] = target[1]
        return self.loaded(ptx, name)

    def loaded(self, ptx, name):
        """The same on the device that PTXEMU_CC names."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return function

    def empty(self, size):
        """Device memory of `size` bytes, as the device has it fresh."""
        pointer = ctypes.c_void_p()
        self.check(self.cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(max(size, 1))))
        return pointer

    def free(self, pointer):
        self.check(self.cuda.cudaFree(pointer))

    def put(self, array):
        """A copy of a numpy array on the device."""
        array = np.ascontiguousarray(array)
        pointer = self.empty(array.nbytes)
        source = array.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cudaMemcpy(pointer, source, ctypes.c_size_t(array.nbytes), HOST_TO_DEVICE))
        return pointer

    def get(self, pointer, shape, dtype):
        array = np.empty(shape, dtype)
        to = array.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cudaMemcpy(to, pointer, ctypes.c_size_t(array.nbytes), DEVICE_TO_HOST))
        return array

    def enqueue(self, kernel, arguments, grid=1, block=32, shared=0, cluster=0, programmatic=False, stream=None):
        """arguments: device pointers, or ctypes integers and structures by value."""
        attributes = (Attribute * 2)()
        count = 0
        if cluster:
            attributes[count] = Attribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
            count += 1
        if programmatic:
            attributes[count] = Attribute(PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1))
            count += 1
        config = LaunchConfig(grid, 1, 1, block, 1, 1, shared, stream, ctypes.addressof(attributes), count)
        pointers = (ctypes.c_void_p * max(len(arguments), 1))(*(ctypes.addressof(value) for value in arguments))
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None))

    def finish(self):
        self.check(self.cuda.cudaDeviceSynchronize())

    def launch(self, kernel, arguments, **options):
        self.enqueue(kernel, arguments, **options)
        self.finish()

    def run(self, body, inputs=(), shape=1, dtype=np.uint32, shared="", target="sm_90a", dynamic=0, **options):
        """Runs a kernel and returns its output at %rd_o. Arrays are %rd_a, %rd_b and so on, numbers %r_a and so on.

        shared: variables of the module; dynamic: bytes of shared memory that the launch adds."""
        arguments = [self.put(each) if isinstance(each, np.ndarray) else ctypes.c_uint32(each) for each in inputs]
        names = [
            letter if isinstance(each, np.ndarray) else f"{letter}:u32"
            for letter, each in zip("abcdefgh", inputs, strict=False)
        ]
        out = self.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        text = ptx(body, (*names, "o"), shared=shared, target=target)
        self.launch(self.kernel(text, "test"), [*arguments, out], shared=dynamic, **options)
        result = self.get(out, shape, dtype)
        for pointer in [*(each for each in arguments if isinstance(each, ctypes.c_void_p)), out]:
            self.free(pointer)
        return result


def ptx(body, parameters=(), name="test", shared="", target="sm_90a", version="8.8"):
    """A kernel. Parameters are named after letters and loaded: pointers as %rd_NAME, .u32 as %r_NAME.

    Registers: %r, %rd, %h (16 bits), %p, %f by number from 0 to 99, and single ones that the body declares.
    """
    declared, loads = [], []
    for parameter in parameters:
        letter, _, kind = parameter.partition(":")
        kind = kind or "u64"
        declared.append(f".param .{kind} p_{letter}")
        register = f"%rd_{letter}" if kind == "u64" else f"%r_{letter}"
        loads.append(f"\t.reg .b{kind[1:]} {register};\n\tld.param.{kind} {register}, [p_{letter}];")
    return f""".version {version}
.target {target}
.address_size 64
{shared}
.visible .entry {name}({", ".join(declared)})
{{
	.reg .pred %p<100>;
	.reg .b16 %h<100>;
	.reg .b32 %r<100>;
	.reg .b64 %rd<100>;
	.reg .f32 %f<100>;
{chr(10).join(loads)}
{body}
	ret;
}}
"""


def line_of(text, part):
    """The number of the first line of a PTX text that has this part."""
    return text[: text.index(part)].count("\n") + 1
