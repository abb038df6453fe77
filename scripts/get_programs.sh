#!/usr/bin/env bash
# Installs Debian's packages for programs that the tests need and this machine lacks: a browser (the one that CHROMIUM
# names, or one in the PATH), a C compiler for the kernels and the stand-in of CANN, openssl for certificates, and nginx as a
# proxy. With the argument `arm`: a C compiler and an emulator for the kernels of ARM processors.
set -euo pipefail

has_any() {
    for program in "$@"; do
        if command -v "$program" >/dev/null; then
            return 0
        fi
    done
    return 1
}

packages=()
hint="install them; a browser elsewhere is named by: make test CHROMIUM=/path/to/chromium"
if [ "${1:-}" = arm ] && [ "$(uname -m)" = aarch64 ]; then
    exit 0
elif [ "${1:-}" = arm ]; then
    hint="install them; \`make check\` runs the tests that need no emulated processor"
    has_any aarch64-linux-gnu-gcc || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    has_any qemu-aarch64 || packages+=(qemu-user)
else
    has_any "${CHROMIUM:-chromium}" chromium-browser google-chrome || packages+=(chromium fonts-dejavu-core)
    has_any gcc clang cc || packages+=(gcc libc6-dev)
    has_any openssl || packages+=(openssl)
    PATH="$PATH:/usr/sbin" has_any nginx || packages+=(nginx-light)
fi
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
fail() {
    echo "error: the tests need the programs of these Debian packages: ${packages[*]}" >&2
    echo "$1" >&2
    echo "hint: $hint" >&2
    exit 1
}
if ! has_any apt-get || { [ "$(id -u)" != 0 ] && ! has_any sudo; }; then
    fail "They are installed by apt-get as root or with sudo, and one of these is missing here."
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
fi
# At most a quarter of an hour for each, also where another process holds apt's lock.
apt=(timeout 900 env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600)
"${as_root[@]}" "${apt[@]}" update || fail "apt-get could not read the lists of packages; is there a network?"
"${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null ||
    fail "apt-get could not install them; is there a network?"
