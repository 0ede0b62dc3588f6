#!/bin/bash
# The run.sh of a chat template that is pinned as such.
set -e
cp ./*.jinja "$WORKSPACE_DIR/"
