#!/usr/bin/env bash
# Installs the Debian packages that are missing: what SGLang needs to compile its page-hash extension
# at its first use (g++, ninja, OpenSSL's and Python's headers), venv for a Debian Python, and what the
# tests of the remote stores run (Redis, and RDMA's library, without which Mooncake does not load), and
# curl, with which docs/quickstart.md asks. And promtool, which tries the alert rules: out of the package
# prometheus, which is not installed, as that would start a server.
# Without root it only says which are missing: the plugin then hashes in Python.
set -euo pipefail
python=${1:-python3.11}

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v ninja >/dev/null || missing+=(ninja-build)
[ -e /usr/include/openssl/sha.h ] || missing+=(libssl-dev)
command -v redis-server >/dev/null || command -v valkey-server >/dev/null || missing+=(redis-server)
command -v openssl >/dev/null || missing+=(openssl)
command -v curl >/dev/null || missing+=(curl)
ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
if ! command -v "$python" >/dev/null; then
    missing+=(python3.11 python3.11-venv python3.11-dev)
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3.11-venv)
    header='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    "$python" -c "$header" || missing+=(python3.11-dev)
fi

promtool=$(command -v promtool || true)

[ ${#missing[@]} -eq 0 ] && [ -n "$promtool" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "system-packages: missing Debian packages, to be installed by root: ${missing[*]}" \
        "${promtool:-promtool (of prometheus)}" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
[ ${#missing[@]} -eq 0 ] || apt-get install -y -qq --no-install-recommends "${missing[@]}"

# Chained, as `set -e` does not hold in what is tried behind `||`.
bring_promtool() {
    local folder done=1
    folder=$(mktemp -d)
    # apt downloads as a user of its own.
    { chown _apt "$folder" 2>/dev/null || true; } && cd "$folder" && apt-get download -qq prometheus &&
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool &&
        install -m 755 promtool /usr/local/bin/promtool && done=0
    cd / && rm -rf "$folder"
    return $done
}
[ -n "$promtool" ] || bring_promtool ||
    echo "system-packages: no promtool, so the alert rules are tried by nobody" >&2
