#!/bin/sh
# rooms_test.sh COMPILER FOLDER:FOLDER... +ROOM... -ROOM...: checks that a file compiled with these include folders finds the
# headers of the rooms of cli/ marked + and none of those marked -.
compiler=$1 folders=$2
shift 2
failed=0
for room in "$@"; do
  case ${room#?} in
    console) header=cli/console/table.h ;;
    bench) header=cli/bench/shapes.h ;;
    verbs) header=cli/verbs/verbs.h ;;
    *) echo "no room of the name ${room#?}"; exit 2 ;;
  esac
  found=-
  echo "#if !__has_include(\"$header\")
#error not found
#endif" | CPLUS_INCLUDE_PATH=$folders "$compiler" -x c++ -std=c++20 -E - >/dev/null 2>&1 && found=+
  if [ "$found${room#?}" != "$room" ]; then
    echo "$header: expected $room, got $found${room#?}"
    failed=1
  fi
done
exit $failed
