# Boots kernels whose modules are not served any more: without a root file system or GPUs, from an initramfs that holds busybox, the
# command and the files it names. To be sourced by scripts/lab.
# shellcheck shell=bash disable=SC2154

# Copies a file, and the libraries it is linked with, to the same path under $1.
add_with_libraries() {
    local to=$1 file=$2 lib
    [[ -e $to$file ]] || cp --parents -L "$file" "$to"
    # What is no dynamic program has no libraries.
    while read -r lib; do
        [[ -e $to$lib ]] || cp --parents -L "$lib" "$to"
    done < <(ldd "$file" 2>/dev/null | grep -oE '/[^ ]+')
}

# Never returns: exits with the command's status. Uses $image, $cpus, $nodes, $memory, $counted, $plugin, $out, $systemd and $timeout.
boot_from_initramfs() {
    local dir word file line status
    [[ ! $systemd && ! $out && ! $plugin ]] || die "kernel $release has no modules: it boots from an initramfs, without --systemd, --plugin and --out"
    ((gpus == 0)) || say "kernel $release has no modules: no GPUs in this guest"
    dir=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$dir'" EXIT
    mkdir -p "$dir"/root/{bin,sbin,proc,sys,dev,tmp,run,etc,var/run,usr/bin}
    cp /bin/busybox "$dir/root/bin/busybox"
    # shellcheck disable=SC2086
    for word in "$@" ${LAB_FILES:-}; do
        file=$(realpath -q -- "$(command -v -- "$word" || echo "$word")") || continue
        [[ ! -f $file || $file == */busybox ]] || add_with_libraries "$dir/root" "$file"
    done
    printf -v line '%q ' "$@"
    mkdir -p "$dir/root$PWD"
    cat >"$dir/root/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin HOME=/
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /sys/fs/cgroup /sys/fs/bpf /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf; mount -t tracefs tracefs /sys/kernel/tracing
cd '$PWD'
echo; echo 'lab begins'
$line
echo "lab exit status: \$?"
poweroff -f
INIT
    chmod +x "$dir/root/init"
    (cd "$dir/root" && find . | cpio -o -H newc --quiet | gzip -1) >"$dir/initrd"
    local qemu=(qemu-system-x86_64 -machine q35 -cpu max -m "${memory}G" -smp "$cpus,sockets=$nodes,cores=$((cpus / nodes)),threads=1"
        -nodefaults -nographic -no-reboot -serial stdio -kernel "$image" -initrd "$dir/initrd"
        -append "console=ttyS0 quiet loglevel=1 panic=-1 tsc=reliable")
    # One thread for all CPUs in either case: scripts/lab says why.
    if [[ $counted ]]; then qemu+=(-icount "shift=0,sleep=off"); else qemu+=(-accel "tcg,thread=single"); fi
    # What comes before is the firmware's.
    timeout --foreground -k 10 "$timeout" "${qemu[@]}" </dev/null 2>&1 | tr -d '\r' | sed -u '1,/^lab begins$/d' | tee "$dir/output" |
        grep --line-buffered -v -e '^lab exit status: ' -e 'reboot: Power down$' || true
    status=$(sed -n 's/^lab exit status: //p' "$dir/output")
    [[ $status ]] || die "the guest ended without an exit status"
    exit "$status"
}
