#!/bin/sh
# Install rlboost with these extras, and its units, on a machine with systemd. As root, in a clone:
#   deploy/systemd/install.sh vllm            # a machine with workers
#   deploy/systemd/install.sh local,vllm      # the reserved machine
# Best done once, in a machine image. See docs/virtual-machines.md.
set -eu
cd "$(dirname "$0")/../.."
python3 -m venv /opt/rlboost
/opt/rlboost/bin/pip install -c constraints.txt ".[${1:?name the extras}]"
ln -sf /opt/rlboost/bin/rlboost /usr/local/bin/rlboost
id rlboost > /dev/null 2>&1 || useradd --system --create-home --home-dir /var/lib/rlboost --shell /bin/bash rlboost
install -m 644 deploy/systemd/*.service /etc/systemd/system/
