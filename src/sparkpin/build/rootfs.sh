#!/bin/sh
# Makes the root file system from inside: /debs has its packages, and the files of all of them lie where they belong, but
# none is installed. A build step of the engine runs this without a network. Neither the host nor the engine has a part
# in it: shell, dpkg and all other programs are those of the packages.
set -eu
# usage: rootfs.sh EPOCH, in seconds
# Nothing of the engine's environment: the packages' own scripts run with it, and these variables decide Python's bytecode.
[ $# -gt 1 ] || exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 SOURCE_DATE_EPOCH="$1" PYTHONHASHSEED=0 \
  PYTHONDONTWRITEBYTECODE=1 DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true /bin/sh "$0" "$1" clean
umask 022

# All are unpacked before the first is configured, so no pre-dependency is met. Nothing has to be on the disk yet, and no
# service is started.
touch /var/lib/dpkg/status
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
dpkg --force-depends --force-unsafe-io --install /debs/*.deb
rm -r /debs /usr/sbin/policy-rc.d

# As in every system that debootstrap or mmdebstrap makes.
dpkg --print-architecture >/var/lib/dpkg/arch
echo '# UNCONFIGURED FSTAB FOR BASE SYSTEM' >/etc/fstab
mkdir -p /var/log/apt

# The server's user. Written here: useradd would add a line with today's date to /etc/shadow.
echo 'sparkpin:*:10001:10001:sparkpin:/home/sparkpin:/bin/sh' >>/etc/passwd
echo 'sparkpin:*:10001:' >>/etc/group
mkdir -p /home/sparkpin
chown 10001:10001 /home/sparkpin
chmod 755 /home/sparkpin

# Names of this installation, and what configures apt, which is not here.
rm -f /etc/machine-id /etc/.pwd.lock
rm -rf /etc/apt /var/lib/apt /var/cache/apt

# Differ from run to run or say when it was: logs, the linker's cache of inode times, backups of edited files.
find /var/log -type f -delete
rm -f /var/cache/ldconfig/aux-cache /etc/*- /var/lib/dpkg/*-old /var/cache/debconf/*-old

# Nobody reads manuals or translations in this image. Licences stay.
find /usr/share/doc -mindepth 1 ! -type d ! -name copyright -delete
find /usr/share/doc -mindepth 1 -type d -empty -delete
for name in bug doc-base info lintian locale man; do rm -rf "/usr/share/${name:?}"; done
