#!/usr/bin/env bash
# Format, lint, types, names and folder sizes, with the tools of .venv. Ends non-zero at the first that complains.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -m ruff format --check .
.venv/bin/python -m ruff check .
.venv/bin/python -m mypy
.venv/bin/python infra/check_house.py
