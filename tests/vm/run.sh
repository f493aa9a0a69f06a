#!/usr/bin/env bash
# kvdepot on devices that few machines have, in a small virtual machine without KVM.
#
# A Debian kernel boots with tests/vm/init as its first process, which runs tests of
# crates/service/tests and of crates/transfer, and the kvdepot command. The exit status of the guest
# is the result.
#
#   first, second  device_dax.rs, on two emulated NVDIMMs. They are files here, so what is on them is
#                  there again at the second boot; the first one stops without a word to its file
#                  systems
#   disks          block_device.rs, on an emulated disk; power_cuts.rs, on three
#   rdma           the unit tests of crates/transfer, those of verbs/tests/guest.rs too, on two
#                  Soft-RoCE devices at the ends of a virtual cable, and the two NVDIMMs
#
# Boots to run alone may be named: `tests/vm/run.sh rdma`.
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
programs=(machine)
boots=${*:-first second disks rdma}
faster='nokaslr mitigations=off random.trust_cpu=on no_timer_check cryptomgr.notests'

skip() {
    echo "skipped: $*"
    exit 0
}

# ---- what is needed ----

declare -A package_of=(
    [qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [modprobe]=kmod
    [xz]=xz-utils [ndctl]=ndctl [mkfs.ext4]=e2fsprogs [dmsetup]=dmsetup
    [ip]=iproute2 [tc]=iproute2 [rdma]=iproute2
)

# Of libibverbs that of Soft-RoCE is needed, and where the library finds it.
verbs_driver=/etc/libibverbs.d/rxe.driver

find_tools() {
    local tool packages=()
    for tool in "${!package_of[@]}"; do
        command -v "$tool" >/dev/null || packages+=("${package_of[$tool]}")
    done
    [ -e $verbs_driver ] || packages+=(libibverbs1 ibverbs-providers)
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
    local unit=(cargo test -p kvdepot-transfer --no-run --lib)
    cargo build --quiet -p kvdepot-cli --no-default-features
    "${build[@]}" --quiet
    "${unit[@]}" --quiet
    command=$target/debug/kvdepot
    built=$("${build[@]}" 2>&1)
    for program in "${programs[@]}"; do
        tests[$program]=$(sed -n "s/.*Executable .*$program.main.rs (\(.*\))$/\1/p" <<<"$built")
    done
    built=$("${unit[@]}" 2>&1)
    tests[transfer]=$(sed -n "s/.*Executable .*lib.rs (\(.*\))$/\1/p" <<<"$built")
}

# ---- the guest's files ----

# Copies a program to the guest's /bin, and the libraries it is linked with to where they are here.
add_program() {
    local path
    path=$(command -v "$1")
    cp --dereference "$path" "$root/bin/${2:-${1##*/}}"
    add_libraries_of "$path"
}

add_libraries_of() {
    local library
    for library in $(ldd "$1" 2>/dev/null | grep -o '/[^ ]*\.so[^ ]*'); do
        mkdir -p "$root${library%/*}"
        cp --dereference "$library" "$root$library"
    done
}

# Copies libibverbs, which nothing is linked with, and its driver for Soft-RoCE.
add_verbs() {
    local library folder
    library=$(ldconfig -p | sed -n 's/.*libibverbs\.so\.1 .*=> //p' | head -n 1)
    # It looks for drivers beside where it really is.
    folder=$(dirname "$(realpath "$library")")
    mkdir -p "$root/${verbs_driver%/*}" "$root$folder/libibverbs"
    cp $verbs_driver "$root$verbs_driver"
    cp --dereference "$library" "$root$folder/${library##*/}"
    add_libraries_of "$library"
    cp "$folder"/libibverbs/librxe-*.so "$root$folder/libibverbs/"
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
    for program in ndctl mkfs.ext4 dmsetup ip tc rdma; do
        rm -f "$root/bin/$program"
        add_program "$program"
    done
    add_program "$command" kvdepot
    # What a debugger wants of them is more than the guest's memory takes.
    strip --strip-debug "$root/bin/kvdepot"
    for program in "${!tests[@]}"; do
        add_program "${tests[$program]}" "$program"
        strip --strip-debug "$root/bin/$program"
    done
    add_verbs
    add_modules nfit nd_pmem dax_pmem device_dax ext4 virtio_pci virtio_blk dm_log_writes \
        crc32_generic rdma_rxe veth sch_netem
    cp "$here/init" "$root/init"
    (cd "$root" && find . | cpio --create --format newc --owner 0:0 --quiet) \
        | gzip -1 >"$work/initrd.gz"
}

# ---- the machine ----

new_nvdimms() {
    rm -f "$work"/*.nvdimm
    truncate --size "$nvdimm_size" "$work"/{device,files}.nvdimm
}

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
for name in $boots; do
    case $name in
        first | second | rdma) [ "$name" = second ] || new_nvdimms; with_nvdimms ;;
        disks) with_disks ;;
        *) echo "no boot is named $name"; exit 2 ;;
    esac
    # The second one is on what knows neither AVX2 nor CLWB.
    boot "$name" "$([ "$name" = second ] && echo qemu64 || echo max)"
done
