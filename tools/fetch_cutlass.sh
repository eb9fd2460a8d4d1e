#!/bin/sh
# Downloads CUTLASS's headers to DIR/include, for the layout oracle (tests/formats/cute) and ptxemu/cutlass. They come from the
# flashinfer-python wheel on PyPI, which contains all of them, so that no access to GitHub is needed.
# usage: tools/fetch_cutlass.sh DIR        then: cmake -DNVFP4_MOE_CUTLASS_DIR=DIR (default: .deps/cutlass)
# The version and its hash are fixed, because the oracle must not change unnoticed. PYTHON names an interpreter with pip.
set -eu

dir=${1:?usage: tools/fetch_cutlass.sh DIR}
python=${PYTHON:-python3}
version=0.6.8
sha256=e96d09b810cedd5f26a6764fface84b0d39dc60cbcc6167dc61bde3e949b3ed0

if [ -e "$dir/include/cutlass/version.h" ]; then
  echo "$dir/include: CUTLASS is already there"
  exit 0
fi
mkdir -p "$dir"
scratch=$(mktemp -d "$dir/fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

echo "flashinfer-python==$version --hash=sha256:$sha256" > "$scratch/requirements.txt"
"$python" -m pip download --quiet --no-deps --require-hashes --only-binary :all: --dest "$scratch" \
  --requirement "$scratch/requirements.txt"
"$python" - "$scratch" <<'PYTHON'
import pathlib, sys, zipfile

scratch = pathlib.Path(sys.argv[1])
prefix = "flashinfer/data/cutlass/include/"
with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
    wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(prefix)])
PYTHON
mv "$scratch/flashinfer/data/cutlass/include" "$dir/include"
echo "$dir/include: CUTLASS headers from flashinfer-python $version"
