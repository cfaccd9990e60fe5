#!/usr/bin/env bash
# Builds the wheel and the sdist of a clean commit into dist/, and proves the wheel where nothing of the checkout is:
# installed into empty environments, in empty folders. Publishes nothing.
#
#     scripts/release.sh                with each of Python 3.11, 3.12 and 3.13 that is there or that uv can fetch
#     scripts/release.sh 3.12 ...       with these
#     scripts/release.sh constraints    only makes scripts/constraints/ anew, by uv
#
# The version is that of grpo_cli/__init__.py, and CHANGELOG.md says what is in it. pip's own settings hold.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/release.sh
source scripts/setup.sh
MOST_BYTES=3000000
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

fail() {
    echo "error: $*" >&2
    exit 1
}

make_constraints() {
    local extras
    extras="$("$tools/python" -c '
import tomllib
for extra in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]:
    if extra != "vllm":  # pins its own versions of what the others need
        print("--extra", extra)
')"
    for resolution in lowest-direct highest; do
        # shellcheck disable=SC2086
        "$tools/uv" pip compile pyproject.toml $extras --resolution "$resolution" --python-version 3.11 \
            --python-platform x86_64-manylinux_2_28 --no-annotate --upgrade --quiet \
            --custom-compile-command "scripts/release.sh constraints" \
            --output-file "scripts/constraints/${resolution%-direct}.txt" >/dev/null
    done
}

# A Python of this version: one of the PATH that answers, else one that uv fetches.
python_of() {
    if "python$1" -c '' 2>/dev/null; then
        command -v "python$1"
    else
        "$tools/uv" python install --quiet "$1" 2>/dev/null && "$tools/uv" python find --managed-python "$1"
    fi
}

# `seconds COMMAND...` says how long a command took; it is silent unless the command fails.
seconds() {
    local start=$SECONDS
    "$@" >said.txt 2>&1 || { cat said.txt >&2; fail "this failed: $*"; }
    echo $((SECONDS - start))
}

prove() (
    folder="$work/with-$1" small=(train.prompts=2 n=2 sampling.max_new_tokens=8 eval.every=0 logger=jsonl)
    mkdir "$folder" && cd "$folder"
    start=$SECONDS
    "$2" -m venv venv
    export PATH="$folder/venv/bin:$PATH"
    pip_took="$(seconds python -m pip install --disable-pip-version-check "$wheel")"
    first=
    while read -r line; do
        [[ $first || $line != "step 1/3 "* ]] || first=$((SECONDS - start))
    done < <(grpo train train.steps=3 logger=jsonl | tee said.txt)
    [[ $first ]] && grep -q '^completed at step 3 of 3' said.txt || { cat said.txt >&2; fail "grpo train with $1"; }
    printf 'def score(reply, answer):\n    return {"short": 1 / (1 + len(reply))}\n' >my_rewards.py
    for i in 1 2 3 4 5 6 7 8; do echo "{\"question\": \"$i+1=\", \"answer\": \"$((i + 1))\"}"; done >mine.jsonl
    own="$(seconds grpo train task=jsonl task.path=mine.jsonl task.reward=my_rewards:score train.steps=1 "${small[@]}")"
    grep -q 'reward/short' outputs/train/*/metrics.jsonl || fail "the reward of one's own was not asked"
    sweep="$(seconds grpo train -m seed=1,2 train.steps=1 "${small[@]}")"
    report="$(seconds grpo report outputs/multirun)"
    [[ -s $(echo outputs/report/*/report.json) ]] || fail "no report"
    grpo --show-completion bash | grep -q _GRPO_COMPLETE || fail "no completion script"
    python -m pip install --quiet --disable-pip-version-check "$wheel[plot]" nbclient ipykernel
    cp "$root/scripts/examples/first_run.ipynb" .
    notebook="$(seconds jupyter execute first_run.ipynb)"
    echo "Python $1: an empty environment trained its first step after $first s, of which pip took $pip_took s;" \
        "own reward $own s, sweep of two $sweep s, report $report s, notebook $notebook s"
)

root="$PWD" work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if [[ ${1:-} != constraints ]]; then
    [[ -z $(git status --porcelain) ]] || fail "the tree has changes that are not committed: git status"
    version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' grpo_cli/__init__.py)"
    grep -qE "^## ${version//./\\.}(,|$)" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version'"
fi
"$(find_python)" -m venv "$work/tools"
tools="$work/tools/bin"
"$tools/python" -m pip install --quiet --disable-pip-version-check build uv
if [[ ${1:-} == constraints ]]; then
    make_constraints
    exit
fi
rm -rf dist
"$tools/python" -m build --outdir dist >"$work/build.txt" 2>&1 || { cat "$work/build.txt" >&2; fail "the build failed"; }
wheel="$root/dist/grpo_cli-$version-py3-none-any.whl"
bytes="$(wc -c <"$wheel")"
((bytes <= MOST_BYTES)) || fail "$wheel has $bytes bytes, more than $MOST_BYTES"
licences="$("$tools/python" -m zipfile -l "$wheel" | grep -oE 'dist-info/licenses/[^ ]*')"
for name in LICENSE grpo_cli/model/tiny/LICENSE; do
    grep -qx "dist-info/licenses/$name" <<<"$licences" || fail "the wheel lacks the licence $name"
done
echo "$wheel: $((bytes / 1000)) kB, with the licences of the code and of the embedded model"
proved=0
(($#)) || set -- 3.11 3.12 3.13
for number; do
    if found="$(python_of "$number")"; then
        prove "$number" "$found"
        proved=$((proved + 1))
    else
        echo "NOT PROVED with Python $number, which is not here and which uv could not fetch"
    fi
done
((proved)) || fail "there was no Python to prove the wheel with"
