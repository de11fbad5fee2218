# Optional libraries. Each is found or not; `forebay doctor` reports what a build has.
# FOREBAY_BUNDLE (made by `make offline-bundle`) may hold headers for machines without packages.
set(FOREBAY_BUNDLE "${CMAKE_SOURCE_DIR}/offline" CACHE PATH "Folder made by make offline-bundle")

# Searched last: what the machine has comes first.
list(APPEND CMAKE_SYSTEM_PREFIX_PATH ${FOREBAY_BUNDLE})

find_package(PkgConfig QUIET)
function(forebay_optional VAR MODULE)
  set(found OFF)
  if(PkgConfig_FOUND)
    pkg_check_modules(${VAR}_PC QUIET IMPORTED_TARGET GLOBAL ${MODULE})
    if(${VAR}_PC_FOUND)
      set(found ON)
    endif()
  endif()
  set(FOREBAY_HAVE_${VAR} ${found} PARENT_SCOPE)
endfunction()

forebay_optional(URING liburing)
forebay_optional(FUSE fuse3)
forebay_optional(UCX ucx)
forebay_optional(JPEG libjpeg)
forebay_optional(PNG libpng)
forebay_optional(WEBP libwebp)
forebay_optional(CURL libcurl)
forebay_optional(OPENSSL openssl>=3)
if(NOT FOREBAY_HAVE_URING AND EXISTS ${FOREBAY_BUNDLE}/lib/liburing.a)
  add_library(PkgConfig::URING_PC STATIC IMPORTED GLOBAL)
  set_target_properties(PkgConfig::URING_PC PROPERTIES
    IMPORTED_LOCATION ${FOREBAY_BUNDLE}/lib/liburing.a
    INTERFACE_INCLUDE_DIRECTORIES ${FOREBAY_BUNDLE}/include)
  set(FOREBAY_HAVE_URING ON)
endif()
if(NOT FOREBAY_URING)
  set(FOREBAY_HAVE_URING OFF)
endif()
foreach(name URING FUSE UCX JPEG PNG WEBP CURL OPENSSL)
  message(STATUS "forebay: optional ${name}: ${FOREBAY_HAVE_${name}}")
endforeach()
