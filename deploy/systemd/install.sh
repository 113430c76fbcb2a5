#!/bin/sh
# Install rlboost with these extras, and its units, on a machine with systemd. As root, in a clone:
#   deploy/systemd/install.sh vllm                          # a machine with workers
#   deploy/systemd/install.sh local,vllm,data,math,logs    # the reserved machine
# Best done once, in a machine image. See docs/virtual-machines.md.
# Needs Python 3.11 to 3.13 with venv, and for vLLM, which compiles kernels at run time, headers and a C compiler: on
# Debian and Ubuntu the packages python3-venv, python3-dev and gcc. PYTHON names another interpreter than python3.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "install.sh: $python is not Python 3.11 to 3.13 with venv: install one, and name it in PYTHON" >&2
    exit 1
}
"$python" -m venv /opt/rlboost
/opt/rlboost/bin/pip install -c constraints.txt ".[${1:?name the extras}]"
ln -sf /opt/rlboost/bin/rlboost /usr/local/bin/rlboost
id rlboost > /dev/null 2>&1 || useradd --system --create-home --home-dir /var/lib/rlboost --shell /bin/bash rlboost
install -m 644 deploy/systemd/*.service /etc/systemd/system/
