#!/bin/sh
# Links the library that `make capi` installs from the static one. Cargo's shared library has the
# same functions without symbol versions. The library stays loaded after dlclose, because it has set
# signal handlers.
#
# usage: link.sh LIBRARY.a OUT.so
set -eu
here=$(dirname "$0")
exec "${CC:-cc}" -shared -o "$2" -Wl,-soname,libkvdepot.so.1 \
	-Wl,--version-script="$here/kvdepot.map" -Wl,--gc-sections -Wl,-z,relro,-z,now,-z,nodelete \
	-Wl,--whole-archive "$1" -Wl,--no-whole-archive -lpthread -ldl -lm -lrt -lgcc_s
