#!/bin/sh
# keep_compiler_report.sh OBJECT COMMAND...: runs the compiler and keeps what it said in OBJECT.report, where
# tools/check/check_ptxas.py reads it. Warnings and errors still reach the terminal; ptxas's statistics do not.
object=$1
shift
"$@" 2>"$object.report"
code=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.report" >&2
exit $code
