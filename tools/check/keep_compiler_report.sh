#!/bin/sh
# keep_compiler_report.sh OBJECT COMMAND...: runs the compiler and writes its messages to OBJECT.report for
# tools/check/check_ptxas.py. Warnings and errors are still printed; ptxas's statistics are not.
object=$1
shift
"$@" 2>"$object.report"
code=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.report" >&2
exit $code
