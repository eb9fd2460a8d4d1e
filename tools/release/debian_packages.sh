#!/bin/sh
# Makes the Debian packages of a build folder (cmake --preset deb), or tries packages in a clean system. ./dev package runs both.
# usage: debian_packages.sh make BUILD OUT          man pages, packages in OUT, lintian
#        debian_packages.sh try OUT MODEL EXAMPLE   needs root: a minimal Debian 12, where the packages are installed, the tool
#                                                   runs, and a C program is compiled and run on a checkpoint
set -eu

# One page for the tool and one for each verb, as git has them, from --help.
man_pages() {
  PATH=$(dirname "$1"):$PATH
  mkdir -p "$2"
  rm -f "$2"/*
  for verb in "" $(nvfp4-moe --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
    page=nvfp4-moe${verb:+-$verb}
    help2man --no-info --version-string "$(nvfp4-moe --version)" --name "$(nvfp4-moe $verb --help | head -1)" \
             "nvfp4-moe${verb:+ $verb}" >"$2/$page.1"
    sed -i "/^\.SH NAME/,/^\.SH SYN/s/^nvfp4.moe $verb /$page /" "$2/$page.1"
    gzip -9n "$2/$page.1"
  done
}

make_packages() {
  build=$1 out=$2
  mkdir -p "$out"
  (man_pages "$build/cli/nvfp4-moe" "$build/debian/man")
  rm -rf "$out"/*.deb "$build/packages"
  (cd "$build" && cpack -B "$build/packages") >"$build/cpack.log" 2>&1 || { cat "$build/cpack.log"; exit 1; }
  cp "$build"/packages/*.deb "$out"
  # The first is for packages of Debian itself. The second: CPack calls ldconfig in addition to our trigger.
  lintian --allow-root --suppress-tags initial-upload-closes-no-bugs,maintscript-calls-ldconfig --fail-on error,warning \
          "$out"/*.deb
}

try_packages() {
  out=$1 model=$2 example=$3
  root=$(mktemp -d)
  trap 'rm -rf --one-file-system "$root"' EXIT
  log=$(debootstrap --variant=minbase bookworm "$root" 2>&1) || { echo "$log" | tail -5; exit 1; }
  mkdir "$root/try"
  cp -r "$out"/*.deb "$model" "$example" "$root/try"
  cat >"$root/try/run.sh" <<'TXT'
set -eu
export DEBIAN_FRONTEND=noninteractive
cd /try
apt() { log=$(apt-get -y -qq --no-install-recommends "$@" 2>&1) || { echo "$log"; exit 1; }; }
apt install ./nvfp4-moe-tools_*.deb
nvfp4-moe doctor
nvfp4-moe verify "$1"
apt install ./*.deb gcc libc6-dev pkgconf
gcc "$2" -o example $(pkg-config --cflags --libs nvfp4_moe)
./example "$1" 1
apt remove libnvfp4-moe0 nvfp4-moe-tools
for gone in /usr/bin/nvfp4-moe /usr/lib/*/libnvfp4_moe.*; do if [ -e "$gone" ]; then echo "$gone: left"; exit 1; fi; done
TXT
  chroot "$root" sh /try/run.sh "$(basename "$model")" "$(basename "$example")"
}

command=$1
shift
case $command in
  make) make_packages "$(realpath "$1")" "$(realpath -m "$2")" ;;
  try) try_packages "$@" ;;
esac
