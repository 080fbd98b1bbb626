#!/usr/bin/env python3
"""Makes the man page and the bash completion of dnnrun from what the tool says of itself.

    tools/make_man.py BINARY OUT.1 OUT.bash
"""
import re
import subprocess
import sys


def say(*args):
    return subprocess.run([sys.argv[1], *args], check=True, text=True, capture_output=True).stdout


def roff(text):
    """Lines as they stand: backslashes, and dots and quotes at the start, mean nothing."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M).strip("\n")


def block(text):
    return f".nf\n{roff(text)}\n.fi\n"


def man(version, overview, helps):
    first, rest = overview.split("\n", 1)
    examples, rest = rest.split("Commands:", 1)
    exits = rest[rest.index("Exit codes:") + len("Exit codes:"):].strip()
    page = [f'.TH DNNRUN 1 "" "{version}" "User Commands"\n.SH NAME\ndnnrun \\- trains residual networks on pictures\n',
            ".SH SYNOPSIS\n.B dnnrun\n.I COMMAND\n.RI [ ARGUMENT \" ...]\"\n",
            f".SH DESCRIPTION\n{roff(first)}\n", ".SH EXAMPLES\n", block(examples)]
    for name, text in helps.items():
        page.append(f".SH DNNRUN {name.upper()}\n")
        page.append(block(text))
    page.append(f".SH EXIT STATUS\n{roff(exits)}\n")
    page.append(".SH FILES\nCfgs that come with dnnrun lie in \\fIshare/dnnrun/models\\fR beside the binary's folder.\n")
    return "".join(page)


COMPLETION = """# bash completion for dnnrun; made by tools/make_man.py
_dnnrun()
{{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{commands} --help --version' -- "$word"))
        return
    fi
    COMPREPLY=()
    case $before in
    {valued}) compopt -o filenames; COMPREPLY=($(compgen -f -- "$word")); return ;;
    =) return ;;
    esac
    case $command in
{options}
    help) words='{commands}' ;;
    esac
    case $word in
    -*) ;;
    *.*) compopt -o nospace; words='{keys}' ;;
    *) [ "$command" = version ] || [ "$command" = help ] ||
        COMPREPLY=($(compgen -f -- "$word") $(compgen -W '{cfgs}' -- "$word")); compopt -o filenames ;;
    esac
    COMPREPLY+=($(compgen -W "$words" -- "$word"))
}}
complete -F _dnnrun dnnrun
"""


def completion(helps, keys):
    options = {name: sorted(set(re.findall(r"--[a-z][a-z-]*", text)) | {"--help"}) for name, text in helps.items()}
    valued = sorted(set(re.findall(r"(--[a-z][a-z-]*) (?:[A-Z]+\b|\S*/)", "\n".join(helps.values()))))
    cfgs = sorted(set(re.findall(r"[\w-]+\.cfg", "\n".join(helps.values()))) - {"mine.cfg", "resolved.cfg"})
    cases = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in options.items())
    return COMPLETION.format(commands=" ".join(helps), options=cases, valued="|".join(valued), cfgs=" ".join(cfgs),
                             keys=" ".join(f"{k}=" for k in keys))


def main():
    _, _, page, bash = sys.argv
    overview = say("--help")
    commands = re.findall(r"^  (\w+) +\S", overview[overview.index("Commands:"):], flags=re.M)
    helps = {name: say(name, "--help") for name in commands}
    keys = re.findall(r"^  ([a-z]+\.[a-z0-9_]+) ", helps["train"], flags=re.M)
    if len(commands) < 5 or len(keys) < 30:
        sys.exit(f"{len(commands)} commands and {len(keys)} keys found: the form of --help has changed")
    with open(page, "w") as f:
        f.write(man(say("--version").strip(), overview, helps))
    with open(bash, "w") as f:
        f.write(completion(helps, keys))


main()
