#!/bin/bash
# A base image from this machine's own Debian packages, where no registry can be reached: base_image.sh TAG...
# It holds what a task's image needs: a shell, coreutils, git, python3. 6-8 s, about 160 MB.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: base_image.sh TAG..." >&2; exit 2; }

packages="base-files base-passwd bash dash coreutils sed grep gawk mawk findutils diffutils tar gzip util-linux procps hostname git python3 python3-minimal ca-certificates ${EXTRA_PACKAGES:-}"
closure=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $packages 2>/dev/null |
  grep -E '^[a-z0-9]' | sort -u)

files=$(mktemp)
trap 'rm -f "$files"' EXIT
for package in $closure; do
  dpkg -L "$package" 2>/dev/null || true
done | grep -vE '^/(usr/share/(doc|man|info|locale|lintian|bug)|boot)(/|$)' |
  sed -E 's,^/(bin|sbin|lib|lib64)/,/usr/\1/,' | sort -u |
  while read -r path; do
    if [ -L "$path" ] || [ -f "$path" ]; then echo "$path"; fi
  done >"$files"
for path in /tmp /var/tmp /root /run /home /opt /bin /sbin /lib /lib64 /etc/passwd /etc/group /etc/nsswitch.conf /usr/bin/awk /etc/alternatives/awk; do
  if [ -e "$path" ]; then echo "$path"; fi
done >>"$files"

# A merged system: what a package calls /bin/x lies in /usr/bin.
id=$(sort -u "$files" | tar --create --no-recursion --files-from=- 2>/dev/null | docker import --change 'CMD ["/bin/bash"]' --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$1")
for tag in "${@:2}"; do
  docker tag "$id" "$tag"
done
