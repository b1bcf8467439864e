#!/usr/bin/env bash
# Puts the peers of bench.py, without what they depend on, into sub-folders of a folder.
set -euo pipefail
folder=${1:?usage: install-peers.sh FOLDER}
put() { # NAME PACKAGE...
    python -m pip install --quiet --no-deps --target "$folder/$1" "${@:2}" || echo "no $1" >&2
}
put axolotl axolotl==0.19.0
put llamafactory llamafactory==0.9.5
put megatron-bridge --ignore-requires-python megatron-bridge==0.6.2
put nemo_toolkit nemo_toolkit==3.0.0
put ms-swift ms-swift==4.6.0 binpacking==2.0.1
put lightbinpack lightbinpack==0.1.1 # from source: a C++ compiler with OpenMP, about two minutes
put grain grain==0.2.18 etils array-record portpicker absl-py dm-tree attrs wrapt importlib_resources zipp
put verl verl==0.9.1
put fairseq fairseq==0.12.2
put lhotse lhotse==1.33.0 intervaltree sortedcontainers cytoolz toolz tabulate soundfile audioread lilcom cffi pycparser
