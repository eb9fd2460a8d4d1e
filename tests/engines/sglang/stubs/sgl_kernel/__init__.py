"""A stub: any name can be imported; calling it raises."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*inputs, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in of tests/engines/sglang")

    return absent
