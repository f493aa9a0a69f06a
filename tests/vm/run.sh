#!/usr/bin/env bash
# kvdepot on devices that few machines have, in a small virtual machine without KVM.
#
# A Debian kernel boots with tests/vm/init as its first process, which runs tests of
# crates/service/tests and the kvdepot command. The exit status of the guest is the result.
#
#   first, second  device_dax.rs, on two emulated NVDIMMs. They are files here, so what is on them is
#                  there again at the second boot; the first one stops without a word to its file
#                  systems
#   disks          block_device.rs, on an emulated disk; power_cuts.rs, on three
#
# What is missing is installed where that is possible, by root with apt-get; else this is skipped,
# with the reason, as are other systems and processors. Everything lies in build/vm.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/sbin:/sbin

here=tests/vm work=build/vm
root=$work/root
nvdimm_size=130M # of which labels and the namespace's own tables take some
patience=1200 # seconds for one boot, on a machine that does other things too
programs=(device_dax block_device power_cuts)
faster='nokaslr mitigations=off random.trust_cpu=on no_timer_check cryptomgr.notests'

skip() {
    echo "skipped: $*"
    exit 0
}

# ---- what is needed ----

declare -A package_of=(
    [qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [modprobe]=kmod
    [xz]=xz-utils [ndctl]=ndctl [mkfs.ext4]=e2fsprogs [dmsetup]=dmsetup
)

find_tools() {
    local tool packages=()
    for tool in "${!package_of[@]}"; do
        command -v "$tool" >/dev/null || packages+=("${package_of[$tool]}")
    done
    ((${#packages[@]})) || return 0
    [ "$(id -u)" = 0 ] || skip "needs the packages ${packages[*]}, and only root installs some"
    echo "installing ${packages[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq \
        --no-install-recommends "${packages[@]}"; } >"$work/apt.log" 2>&1 \
        || skip "cannot install ${packages[*]}: $(tail -n 1 "$work/apt.log")"
}

# The version that Debian's package for the current kernel stands for, if apt knows it.
newest_version() {
    { apt-cache depends linux-image-amd64 2>/dev/null || true; } \
        | sed -n 's/.*Depends: linux-image-//p'
}

# Sets `kernel` to the folder of Debian's kernel, and `version`.
find_kernel() {
    local package
    version=$(newest_version)
    if [ -z "$version" ] && [ "$(id -u)" = 0 ]; then
        apt-get update -qq || true # a fresh system has no lists
        version=$(newest_version)
    fi
    [ "$version" ] || skip "apt knows no linux-image-amd64"
    kernel=$work/linux-$version package=linux-image-$version
    [ -e "$kernel/complete" ] && return
    rm -rf "$kernel" && mkdir "$kernel"
    echo "downloading $package"
    (cd "$kernel" && apt-get download "$package") >"$work/apt.log" 2>&1 \
        || skip "cannot download $package: $(tail -n 1 "$work/apt.log")"
    dpkg -x "$kernel/$package"_*.deb "$kernel"
    rm "$kernel/$package"_*.deb
    depmod --basedir "$kernel" "$version"
    touch "$kernel/complete"
}

# Sets `command` to the command, and `tests` to the programs of tests, by their names.
declare -A tests
build_programs() {
    local target=${CARGO_TARGET_DIR:-target} program built
    local build=(cargo test -p kvdepot-service --no-run)
    for program in "${programs[@]}"; do
        build+=(--test "$program")
    done
    cargo build --quiet -p kvdepot-cli --no-default-features
    "${build[@]}" --quiet
    command=$target/debug/kvdepot
    built=$("${build[@]}" 2>&1)
    for program in "${programs[@]}"; do
        tests[$program]=$(sed -n "s/.*Executable .*$program.rs (\(.*\))$/\1/p" <<<"$built")
    done
}

# ---- the guest's files ----

# Copies a program to the guest's /bin, and the libraries it is linked with to where they are here.
add_program() {
    local path library
    path=$(command -v "$1")
    cp --dereference "$path" "$root/bin/${2:-${1##*/}}"
    for library in $(ldd "$path" 2>/dev/null | grep -o '/[^ ]*\.so[^ ]*'); do
        mkdir -p "$root${library%/*}"
        cp --dereference "$library" "$root$library"
    done
}

# Copies kernel modules with what they need, and writes down the order to insert them in.
add_modules() {
    local module file name
    for module in "$@"; do
        modprobe --config /dev/null --dirname "$kernel" --set-version "$version" \
            --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
        name=$(basename "$file" .xz)
        case $file in
            *.xz) xz --decompress --stdout "$file" >"$root/modules/$name" ;;
            *) cp "$file" "$root/modules/$name" ;;
        esac
        echo "$name" >>"$root/modules/order"
    done
}

build_guest() {
    local program applet
    rm -rf "$root"
    mkdir -p "$root"/{bin,dev,etc,mnt,modules,proc,run,sys,tmp}
    add_program busybox
    for applet in $(busybox --list); do
        ln -s busybox "$root/bin/$applet" 2>/dev/null || true # busybox itself is there
    done
    for program in ndctl mkfs.ext4 dmsetup; do
        rm -f "$root/bin/$program"
        add_program "$program"
    done
    add_program "$command" kvdepot
    # What a debugger wants of them is more than the guest's memory takes.
    strip --strip-debug "$root/bin/kvdepot"
    for program in "${programs[@]}"; do
        add_program "${tests[$program]}" "$program"
        strip --strip-debug "$root/bin/$program"
    done
    add_modules nfit nd_pmem dax_pmem device_dax ext4 virtio_pci virtio_blk dm_log_writes
    cp "$here/init" "$root/init"
    (cd "$root" && find . | cpio --create --format newc --owner 0:0 --quiet) \
        | gzip -1 >"$work/initrd.gz"
}

# ---- the machine ----

# Sets `media` to two NVDIMMs, which keep what they hold.
with_nvdimms() {
    local backend=memory-backend-file,share=on,align=2M,size=$nvdimm_size medium
    media=()
    for medium in device files; do
        media+=(
            -object "$backend,id=$medium,mem-path=$work/$medium.nvdimm"
            -device "nvdimm,id=nvdimm-$medium,memdev=$medium,label-size=128K"
        )
    done
}

# Sets `media` to new disks. The first has logical blocks of 4 KiB.
with_disks() {
    local number=0 size drive
    media=()
    for size in 80M 48M 1G 48M; do
        rm -f "$work/$number.disk"
        truncate --size "$size" "$work/$number.disk"
        drive=file=$work/$number.disk,format=raw,if=none,cache=unsafe,discard=unmap
        media+=(-drive "$drive,id=disk$number")
        media+=(-device "virtio-blk-pci,drive=disk$number$( ((number)) \
            || echo ,logical_block_size=4096,physical_block_size=4096)")
        number=$((number + 1))
    done
}

# boot NAME CPU: boots once with `media`; fails unless the guest's checks all held.
boot() {
    local name=$1 cpu=$2 log=$work/$1.log begun=$SECONDS status=0
    echo "$name boot, processor $cpu"
    timeout "$patience" qemu-system-x86_64 -accel tcg,thread=multi -cpu "$cpu" -smp 2 \
        -machine q35,nvdimm=on -m 1G,slots=4,maxmem=4G -nodefaults -no-user-config \
        -display none -no-reboot -serial "file:$log" \
        -kernel "$kernel/boot/vmlinuz-$version" -initrd "$work/initrd.gz" \
        -append "console=ttyS0 quiet panic=-1 kvdepot.boot=$name $faster" \
        -device isa-debug-exit,iobase=0xf4,iosize=4 "${media[@]}" || status=$?
    # The guest's status n ends qemu with 2 n + 1, so that 1 is success.
    if [ "$status" != 1 ]; then
        cat "$log"
        echo "failed: the $name boot ended with $status in place of 1, after" \
            "$((SECONDS - begun)) s; its console is above, and in $log"
        exit 1
    fi
    tr -d '\r' <"$log" | grep -e '^vm: ' -e '^ok: '
    echo "$name boot: $((SECONDS - begun)) s"
}

[ "$(uname -sm)" = 'Linux x86_64' ] || skip "the machine is built for Linux on x86-64 only"
command -v apt-get >/dev/null || skip "the kernel is Debian's, and comes by apt-get"
mkdir -p "$work"
find_tools
find_kernel
build_programs
build_guest
rm -f "$work"/*.nvdimm
truncate --size "$nvdimm_size" "$work"/{device,files}.nvdimm
with_nvdimms
boot first max
boot second qemu64 # what knows neither AVX2 nor CLWB
with_disks
boot disks max
