# The lab's kernels: Debian's, from the backports suite that has sched_ext, unpacked under $cache/kernels. To be sourced after common.sh.
# shellcheck shell=bash disable=SC2154

kernels=$cache/kernels
# Debian's kernels have CONFIG_SCHED_CLASS_EXT from 6.16 on, in this suite.
suite=trixie-backports
oldest_series=6.16

# apt with a configuration of its own: the machine's sources stay as they are (adding the suite would upgrade its C library).
private_apt() {
    APT_CONFIG=$cache/apt/apt.conf "$@"
}

update_index() {
    local apt=$cache/apt archive
    mkdir -p "$apt"/state/lists/partial "$apt"/cache/archives/partial "$kernels"
    if [[ -z $(find "$apt/updated" -mmin -720 2>/dev/null) ]]; then
        archive=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(SUITE)' | awk '$2 == "Debian" && $3 !~ /security/ { print $1; exit }')
        [[ $archive ]] || die "the machine's apt configuration names no Debian archive to fetch kernels from (see apt-get indextargets)"
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" >"$apt/sources.list"
        cat >"$apt/apt.conf" <<CONF
Dir::State "$apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
APT::Architecture "amd64";
CONF
        say "reading the list of kernels ($suite)"
        private_apt apt-get -qq update >&2 || die "could not read the package list of $suite (apt's message is above)"
        touch "$apt/updated"
    fi
}

# Every full release string there is, oldest first, one of each series (the newest of it).
known_releases() {
    private_apt apt-cache pkgnames linux- |
        sed -nE 's/^linux-(image|binary)-([0-9]+\.[0-9]+\.[0-9]+\+deb[0-9]+-amd64)$/\2/p' | sort -uV |
        awk -F. '{ last[$1 "." $2] = $0; if (!seen[$1 "." $2]++) order[++n] = $1 "." $2 } END { for (i = 1; i <= n; i++) print last[order[i]] }'
}

has_package() {
    # Not `grep -q`, which ends early: under pipefail the writer's SIGPIPE would then be taken for a failure.
    [[ $(private_apt apt-cache show "$1" 2>/dev/null) == *Filename:* ]]
}

# Whether Debian serves the modules of this release. Those it does not (6.19 to 7.1) boot from an initramfs, without DRM.
has_modules() {
    has_package "linux-modules-$1" || ! has_package "linux-binary-$1"
}

# "newest", "oldest", a series (7.3) or a release (7.3.4+deb13-amd64) -> a release. Unpacked ones need no archive.
resolve_release() {
    local want=$1 found
    if [[ -d $kernels/$want ]]; then
        echo "$want"
        return
    fi
    update_index
    case $want in
    newest) found=$(known_releases | while read -r r; do has_modules "$r" && echo "$r"; done | tail -n 1) ;;
    oldest) found=$(known_releases | grep "^${oldest_series//./\\.}\." | tail -n 1) ;;
    *) found=$(known_releases | awk -v want="$want" 'index($0, want) == 1 && substr($0, length(want) + 1) ~ /^([.+-]|$)/' | tail -n 1) ;;
    esac
    [[ $found ]] || die "no kernel '$want' in $suite; there are: newest, oldest, $(known_releases | tr '\n' ' ')"
    echo "$found"
}

# The kernel image of an unpacked release.
kernel_image() {
    local d=$kernels/$1
    if [[ -e $d/boot/vmlinuz-$1 ]]; then echo "$d/boot/vmlinuz-$1"; else echo "$d/usr/lib/modules/$1/vmlinuz"; fi
}

# Downloads (apt verifies the signature chain) and unpacks a release, once.
fetch_kernel() {
    local release=$1 tmp package packages=()
    [[ -e $kernels/$release/.complete ]] && return
    update_index
    if has_package "linux-binary-$release"; then
        packages=("linux-binary-$release")
        ! has_package "linux-modules-$release" || packages+=("linux-modules-$release")
    else
        packages=("linux-image-$release")
    fi
    say "fetching ${packages[*]}"
    tmp=$(mktemp -d "$kernels/.fetch.XXXXXX")
    (cd "$tmp" && private_apt apt-get -q download "${packages[@]}" >&2) || {
        rm -rf "$tmp"
        die "could not download ${packages[*]}"
    }
    mkdir "$tmp/tree"
    for package in "$tmp"/*.deb; do dpkg-deb -x "$package" "$tmp/tree"; done
    if [[ -d $tmp/tree/lib && ! -d $tmp/tree/usr/lib/modules ]]; then
        mkdir -p "$tmp/tree/usr" && mv "$tmp/tree/lib" "$tmp/tree/usr/lib"
    fi
    if [[ -d $tmp/tree/usr/lib/modules/$release/kernel ]]; then /sbin/depmod -b "$tmp/tree/usr" "$release"; fi
    touch "$tmp/tree/.complete"
    rm -rf "${kernels:?}/$release"
    mv "$tmp/tree" "$kernels/$release"
    rm -rf "$tmp"
}

# The build options of an unpacked release, fetched if its packages lack them. Fails if there are none.
kernel_config() {
    local release=$1 series package config tmp
    config=$kernels/$release/boot/config-$release
    if [[ ! -e $config ]]; then
        series=$(cut -d. -f1,2 <<<"$release")
        package=linux-config-$series
        update_index
        has_package "$package" || return 1
        tmp=$(mktemp -d "$kernels/.fetch.XXXXXX")
        (cd "$tmp" && private_apt apt-get -q download "$package" >&2) && dpkg-deb -x "$tmp"/*.deb "$tmp/tree" &&
            mkdir -p "${config%/*}" && xzcat "$tmp/tree/usr/src/linux-config-$series/config.amd64_none_amd64.xz" >"$tmp/config" &&
            mv "$tmp/config" "$config"
        rm -rf "$tmp"
    fi
    [[ -s $config ]] && echo "$config"
}
