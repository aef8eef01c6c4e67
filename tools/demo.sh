#!/bin/sh
# Shows the main job: each built-in model continues the opening of a story, and prints its speed. Nothing is trained.
set -eu
cd "$(dirname "$0")/.."

continue_story() {
    printf '\n%s\n' "$1"
    "${VENV:-.venv}/bin/fastgen" generate "$1" "$2" --echo --stats --temperature 0.7 --seed "$3" --max-new-tokens 250
}

continue_story tiny-llama "Once upon a time" 1
continue_story tiny-mistral "This is the story of" 2
continue_story tiny-opt "There once was" 3
