#!/bin/sh
# The main job: each built-in model goes on with the opening of a story, and tells how fast. Nothing is trained.
set -eu
cd "$(dirname "$0")/.."

tell() {
    printf '\n%s\n' "$1"
    .venv/bin/fastgen generate "$1" "$2" --echo --stats --temperature 0.7 --seed "$3" --max-new-tokens 250
}

tell tiny-llama "Once upon a time" 1
tell tiny-mistral "This is the story of" 2
tell tiny-opt "There once was" 3
