# Completes the words of sparkpin and invoke in zsh: see completion.py.
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_sparkpin() {
    local -a found
    found=(${(f)"$($words[1] --complete -- "${(@)words[1,CURRENT]}" 2>/dev/null)"})
    compadd -a found || _files
}
compdef _sparkpin sparkpin invoke
