# Debian packages by CPack (./dev package), and the licence files that every installation has.
#
# Three packages, split as Debian does: a library with another soname can be installed next to this one, and programs that run
# need no headers. The tool has the library inside, so it needs neither of the others.
option(NVFP4_MOE_DEB "Install what Debian packages need: copyright, changelog and man pages" OFF)

# install_notices(COMPONENT PACKAGE)
function(install_notices component package)
  if(NVFP4_MOE_DEB)
    install(FILES ${PROJECT_BINARY_DIR}/debian/copyright ${PROJECT_BINARY_DIR}/debian/changelog.Debian.gz
            DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} COMPONENT ${component})
  else()
    install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES.txt
            DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT ${component})
  endif()
endfunction()
if(NOT NVFP4_MOE_DEB)
  return()
endif()

set(NVFP4_MOE_DEB_MAINTAINER "" CACHE STRING "Who builds the packages, as Name <address>")
if(NOT NVFP4_MOE_DEB_MAINTAINER MATCHES "^[^<>]+ <[^<>]+@[^<>]+>$")
  message(FATAL_ERROR "NVFP4_MOE_DEB_MAINTAINER: expected Name <address>, got \"${NVFP4_MOE_DEB_MAINTAINER}\"")
endif()
file(READ THIRD_PARTY_NOTICES.txt notices)
file(WRITE ${PROJECT_BINARY_DIR}/debian/copyright
     "nvfp4-moe\n\nCopyright: the authors of nvfp4-moe\nLicense: Apache License, Version 2.0\n\n"
     "On Debian systems the text of that licence is in /usr/share/common-licenses/Apache-2.0.\n\n${notices}")
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # of SOURCE_DATE_EPOCH if that is set
file(WRITE ${PROJECT_BINARY_DIR}/debian/changelog.Debian
     "nvfp4-moe (${PROJECT_VERSION}-1) unstable; urgency=medium\n\n  * Built from the sources of ${PROJECT_VERSION}.\n\n"
     " -- ${NVFP4_MOE_DEB_MAINTAINER}  ${date}\n")
execute_process(COMMAND gzip -9nf ${PROJECT_BINARY_DIR}/debian/changelog.Debian COMMAND_ERROR_IS_FATAL ANY)
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
install(DIRECTORY ${PROJECT_BINARY_DIR}/debian/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tool)

set(CPACK_GENERATOR DEB)
set(CPACK_COMPONENTS_ALL library development tool)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER ${NVFP4_MOE_DEB_MAINTAINER})
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

# deb(COMPONENT PACKAGE SECTION SUMMARY TEXT)
macro(deb component package section summary text)
  set(CPACK_DEBIAN_${component}_PACKAGE_NAME ${package})
  set(CPACK_DEBIAN_${component}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${component}_DESCRIPTION
      "mixture-of-experts layers with NVFP4 weights - ${summary}\nnvfp4-moe runs the expert layers of language models from NVFP4\ncheckpoints, "
      "on CPUs and on NVIDIA GPUs.\n\n${text}")
  list(JOIN CPACK_DEBIAN_${component}_DESCRIPTION "" CPACK_DEBIAN_${component}_DESCRIPTION)
endmacro()
deb(LIBRARY libnvfp4-moe0 libs "library" "This package has the shared library.")
deb(DEVELOPMENT libnvfp4-moe-dev libdevel "development files"
    "This package has the headers for C and C++, the static library, and files\nfor pkg-config and CMake.")
deb(TOOL nvfp4-moe-tools utils "command line"
    "This package has nvfp4-moe, which inspects, quantizes, verifies, runs and\ntimes checkpoints.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libnvfp4-moe0 (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers)
include(CPack)
