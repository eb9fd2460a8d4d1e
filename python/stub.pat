# Patterns of nanobind's stub generator. It leaves out __version__, which the package exports.
nvfp4_moe._core.__version__:
    __version__: str
