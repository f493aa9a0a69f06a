#!/usr/bin/env bash
# kvdepot on a device DAX and on a DAX file system, in a small virtual machine without KVM.
#
# A Debian kernel with two emulated NVDIMMs boots twice, each time with tests/vm/init as its first
# process, which runs crates/service/tests/device_dax.rs and the kvdepot command. The NVDIMMs are
# files here, so what is on them is there again at the second boot; the first one stops without a
# word to its file systems. The exit status of the guest is the result.
#
# What is missing is installed where that is possible, by root with apt-get; else this is skipped,
# with the reason, as are other systems and processors. Everything lies in build/vm.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/sbin:/sbin

here=tests/vm work=build/vm
root=$work/root
nvdimm_size=130M # of which labels and the namespace's own tables take some
patience=300 # seconds for one boot
faster='nokaslr mitigations=off random.trust_cpu=on no_timer_check cryptomgr.notests'

skip() {
    echo "skipped: $*"
    exit 0
}

# ---- what is needed ----

declare -A package_of=(
    [qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [modprobe]=kmod
    [xz]=xz-utils [ndctl]=ndctl [mkfs.ext4]=e2fsprogs
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

# Sets `command` and `test` to the programs under test.
build_programs() {
    local target=${CARGO_TARGET_DIR:-target} name='s/.*Executable .*device_dax.rs (\(.*\))$/\1/p'
    local build=(cargo test -p kvdepot-service --test device_dax --no-run)
    cargo build --quiet -p kvdepot-cli --no-default-features
    "${build[@]}" --quiet
    command=$target/debug/kvdepot
    test=$("${build[@]}" 2>&1 | sed -n "$name")
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
    for program in ndctl mkfs.ext4; do
        rm -f "$root/bin/$program"
        add_program "$program"
    done
    add_program "$command" kvdepot
    add_program "$test" device_dax
    # What a debugger wants of them is more than the guest's memory takes.
    strip --strip-debug "$root"/bin/{kvdepot,device_dax}
    add_modules nfit nd_pmem dax_pmem device_dax ext4
    cp "$here/init" "$root/init"
    (cd "$root" && find . | cpio --create --format newc --owner 0:0 --quiet) \
        | gzip -1 >"$work/initrd.gz"
}

# ---- the machine ----

# boot NAME CPU: boots once; fails unless the guest's checks all held.
boot() {
    local name=$1 cpu=$2 log=$work/$1.log begun=$SECONDS status=0 medium
    local backend=memory-backend-file,share=on,align=2M,size=$nvdimm_size media=()
    for medium in device files; do
        media+=(
            -object "$backend,id=$medium,mem-path=$work/$medium.nvdimm"
            -device "nvdimm,id=nvdimm-$medium,memdev=$medium,label-size=128K"
        )
    done
    echo "$name boot, processor $cpu"
    timeout "$patience" qemu-system-x86_64 -accel tcg,thread=multi -cpu "$cpu" -smp 2 \
        -machine q35,nvdimm=on -m 512M,slots=4,maxmem=4G -nodefaults -no-user-config \
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
boot first max
boot second qemu64 # what knows neither AVX2 nor CLWB
