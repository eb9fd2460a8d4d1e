"""A stand-in: any name can be imported; what is called raises."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*inputs, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in of tests/engines/sglang")

    return absent
