#!/bin/sh
# Runs on the host with the new root file system as $1, after every package is installed there.
set -eu
root=$1

# The server's user. Written here, because `passwd` and its useradd would be a package for one line.
echo 'sparkpin:*:10001:10001:sparkpin:/home/sparkpin:/bin/sh' >>"$root/etc/passwd"
echo 'sparkpin:*:10001:' >>"$root/etc/group"
mkdir -p "$root/home/sparkpin"
chown 10001:10001 "$root/home/sparkpin"
chmod 755 "$root/home/sparkpin"

# The host's names, and what only this installation needed. The engine mounts its own resolv.conf and hostname.
rm -f "$root/etc/resolv.conf" "$root/etc/hostname" "$root/etc/machine-id" "$root/etc/.pwd.lock"
rm -rf "$root/etc/apt" "$root/var/lib/apt" "$root/var/cache/apt" "$root"/etc/dpkg/dpkg.cfg.d/*mmdebstrap*
rm -f "$root"/usr/bin/qemu-*-static

# Differ from run to run or say when it was: logs, the linker's cache of inode times, backups of edited files.
find "$root/var/log" -type f -delete
rm -f "$root/var/cache/ldconfig/aux-cache" "$root"/etc/*- "$root"/var/lib/dpkg/*-old "$root"/var/cache/debconf/*-old

# Nobody reads manuals or translations in this image. Licences stay.
find "$root/usr/share/doc" -mindepth 1 ! -type d ! -name copyright -delete
find "$root/usr/share/doc" -mindepth 1 -type d -empty -delete
for name in bug doc-base info lintian locale man; do rm -rf "${root:?}/usr/share/$name"; done
