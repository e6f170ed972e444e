#!/usr/bin/env bash
# Installs what tests/slurm needs from Debian's or Ubuntu's packages, as root: SLURM, munge, strace.
# Continuous integration calls it (.ci/run); tests/run.sh never does. Starts no service.
set -euo pipefail

packages=(slurm-wlm munge strace)
missing=()
for package in "${packages[@]}"; do
  if [[ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" != "install ok installed" ]]; then
    missing+=("$package")
  fi
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "tests/slurm/install.sh: error: no apt-get here; install ${missing[*]} yourself" >&2
  exit 1
fi
sudo=()
if [[ "$(id -u)" -ne 0 ]]; then
  sudo=(sudo -n)
fi
# Waits for another apt instead of failing; packages must not start daemons of their own.
apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get
  -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -yqq)
for attempt in 1 2 3; do
  if "${apt[@]}" install --no-install-recommends "${missing[@]}"; then
    exit 0
  fi
  echo "tests/slurm/install.sh: attempt $attempt failed; updating the package lists" >&2
  "${apt[@]}" update || true
  sleep 5
done
echo "tests/slurm/install.sh: error: could not install ${missing[*]}; see apt-get's words above" >&2
exit 1
