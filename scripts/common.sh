# Shared by the scripts of this folder: messages, the cache folder, and packages. To be sourced.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/scx_stoker}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Installs the Debian packages of "$@" that are missing.
need_packages() {
    local missing=() p sudo=()
    for p in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) == installed ]] || missing+=("$p")
    done
    ((${#missing[@]})) || return 0
    if ((EUID)); then
        command -v sudo >/dev/null || die "these Debian packages are missing: ${missing[*]}. Install them as root, then run this again."
        sudo=(sudo)
    fi
    say "installing ${missing[*]}"
    # A failed update of one of the machine's sources does not matter where the packages are known all the same.
    "${sudo[@]}" apt-get -qq update >&2 || true
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >&2 ||
        die "apt-get could not install ${missing[*]} (its message is above)"
}

# What building needs. libudev-dev because hwlocality asks `pkg-config --static`.
need_build_packages() {
    need_packages ca-certificates gcc libc6-dev make pkg-config libelf-dev zlib1g-dev clang-19 libhwloc-dev libudev-dev
    command -v cargo >/dev/null || die "no cargo: install Rust 1.91 or newer (rustup.rs, or your distribution's packages)"
}

# What the lab needs. udev makes the guest's /dev/virtio-ports, over which virtme-ng carries input, output and exit status.
need_lab_packages() {
    need_packages qemu-system-x86 kmod busybox-static udev cpio python3 python3-venv debian-archive-keyring
    venv=$cache/venv
    if [[ ! -x $venv/bin/vng ]]; then
        say "installing virtme-ng from PyPI into $venv"
        /usr/bin/python3 -m venv "$venv" >&2 && "$venv/bin/pip" install -q virtme-ng==1.42 >&2 ||
            die "could not install virtme-ng into $venv (pip's message is above)"
    fi
}
