#!/usr/bin/env bash
# Format, lint, types, names, folder sizes and the configuration page, with the tools of .venv. Ends non-zero at the first that complains.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -m ruff format --check .
.venv/bin/python -m ruff check .
.venv/bin/python -m mypy
.venv/bin/python infra/check_house.py
.venv/bin/python infra/config_reference.py --check
