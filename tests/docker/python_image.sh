#!/bin/bash
# A stand-in for the Python base image of compose/Dockerfile, where no registry can be reached: python_image.sh VENV TAG
# This machine's Debian packages, and the packages of an environment that `make setup-dev` made: pip finds all that it asks for.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: python_image.sh VENV TAG" >&2; exit 2; }
venv=$1 tag=$2
here=$(dirname "$0")

EXTRA_PACKAGES="bubblewrap mount libstdc++6 libgomp1 libpython3.11-stdlib" "$here/base_image.sh" "$tag" >/dev/null
container=$(docker create --network none "$tag" rm -f /usr/lib/python3.11/EXTERNALLY-MANAGED)
builder=$(mktemp -d)
trap 'docker rm -f "$container" >/dev/null; rm -rf "$builder"' EXIT
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/../../constraints.txt" --target "$builder" hatchling
tar --create --directory "$builder" --transform 's,^\.,usr/local/lib/python3.11/dist-packages,' . | docker cp - "$container:/"
tar --create --directory "$venv/lib/python3.11/site-packages" \
  --exclude='*.pth' --exclude='__editable__*' --exclude='rl360*' --exclude=transformers --exclude='transformers-*' --exclude=pyright \
  --exclude='pyright-*' --exclude=__pycache__ --exclude=torch/include --exclude=torch/test \
  --transform 's,^\.,usr/local/lib/python3.11/dist-packages,' . |
  docker cp - "$container:/"
tar --create --dereference --directory "$venv/bin" --transform 's,^,usr/local/bin/,' nats-server | docker cp - "$container:/"
docker start --attach "$container"
docker commit "$container" "$tag" >/dev/null
