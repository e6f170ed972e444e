"""Sixty injection strings; each would create the file ``CANARY`` if it were executed.

``CANARY`` is a placeholder for the file's path.
"""

from __future__ import annotations

HOSTILE = (
    # Shells.
    "; touch CANARY", "a; touch CANARY", "&& touch CANARY", "|| touch CANARY", "| touch CANARY",
    "& touch CANARY &", "$(touch CANARY)", "a$(touch CANARY)b", "`touch CANARY`", "a`touch CANARY`",
    "${IFS}$(touch${IFS}CANARY)", "$((1))$(touch CANARY)", "' ; touch CANARY; '",
    '" ; touch CANARY; "', "'; touch CANARY #", '"; touch CANARY #', "\\'; touch CANARY; \\'",
    "\ntouch CANARY\n", "a\ntouch CANARY", "a\r\ntouch CANARY", "a\x00touch CANARY",
    "<(touch CANARY)", ">(touch CANARY)", "> CANARY", ">> CANARY", "a > CANARY", "2> CANARY",
    "{touch,CANARY}", "! touch CANARY", "(touch CANARY)", "eval touch CANARY",
    "x=1 touch CANARY", "() { :; }; touch CANARY", "!!; touch CANARY", "~/; touch CANARY",
    "* ; touch CANARY", "a\ttouch\tCANARY", "a\\\ntouch CANARY", "a\x1btouch CANARY",
    "\u2028touch CANARY", "\uff1btouch CANARY", "a\u00a0$(touch CANARY)",
    # Batch scripts and SLURM's own languages.
    "\n#SBATCH --wrap=touch CANARY", "#SBATCH --output=CANARY", "a --wrap=touch\\ CANARY",
    "--wrap=touch CANARY", "--output=CANARY", "-o CANARY", "--prolog=CANARY",
    "--task-prolog=CANARY", "a,--bcast=CANARY", "%x$(touch CANARY)", "%j/../../CANARY",
    "a%%$(touch CANARY)", "node[1-2];touch CANARY",
    # Python and YAML.
    "__import__('os').system('touch CANARY')", "!!python/object/apply:os.system ['touch CANARY']",
    "${oc.env:HOME}$(touch CANARY)", "{{ touch CANARY }}", "-c __import__('os').mkdir('CANARY')",
    # Paths.
    "../../../../../../CANARY",
)  # fmt: skip
