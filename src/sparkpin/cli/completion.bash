# Completes the words of sparkpin and invoke in bash: see completion.py.
_sparkpin() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        if [[ $word == "$2"* ]]; then COMPREPLY+=("$word"); fi
    done < <("$1" --complete -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
}
complete -o default -F _sparkpin sparkpin invoke
