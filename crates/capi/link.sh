#!/bin/sh
# Makes the library that is installed of the static one: Cargo's own has the same functions, and
# names no versions of them. It stays loaded after dlclose, for the signal handlers that it has set.
#
# usage: link.sh LIBRARY.a OUT.so
set -eu
here=$(dirname "$0")
exec "${CC:-cc}" -shared -o "$2" -Wl,-soname,libkvdepot.so.1 \
	-Wl,--version-script="$here/kvdepot.map" -Wl,--gc-sections -Wl,-z,relro,-z,now,-z,nodelete \
	-Wl,--whole-archive "$1" -Wl,--no-whole-archive -lpthread -ldl -lm -lrt -lgcc_s
