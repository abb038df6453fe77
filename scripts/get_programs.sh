#!/usr/bin/env bash
# Installs Debian's packages for programs that the tests need and this machine lacks: a browser (the one that CHROMIUM
# names, or one in the PATH), a C compiler for the kernels and the stand-in of CANN, and openssl for certificates. With the
# argument `arm`: a C compiler and an emulator for the kernels of ARM processors.
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
if [ "${1:-}" = arm ] && [ "$(uname -m)" = aarch64 ]; then
    exit 0
elif [ "${1:-}" = arm ]; then
    has_any aarch64-linux-gnu-gcc || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    has_any qemu-aarch64 || packages+=(qemu-user)
else
    has_any "${CHROMIUM:-chromium}" chromium-browser google-chrome || packages+=(chromium fonts-dejavu-core)
    has_any gcc clang cc || packages+=(gcc libc6-dev)
    has_any openssl || packages+=(openssl)
fi
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
if ! has_any apt-get; then
    echo "error: the tests need the programs of these Debian packages, and there is no apt-get: ${packages[*]}" >&2
    echo "hint: install them; a browser elsewhere is named by: make test CHROMIUM=/path/to/chromium" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
