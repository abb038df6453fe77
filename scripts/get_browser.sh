#!/usr/bin/env bash
# Makes sure that there is a Chromium for the tests of the page: the one that CHROMIUM names, one in the PATH, or
# Debian's, which is installed.
set -euo pipefail

for browser in "${CHROMIUM:-chromium}" chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null; then
    echo "error: no Chromium found, and no apt-get to install it" >&2
    echo "hint: install Chromium, or name one: make test CHROMIUM=/path/to/chromium" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core \
    >/dev/null
