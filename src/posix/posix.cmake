# libforebay_posix.so, which `forebay run` preloads into any program: nothing of the C++ library, no
# exceptions, no sanitizer, and no name but libc's visible.
set(posix_flags -fno-exceptions -fno-rtti -fno-threadsafe-statics -ftls-model=initial-exec
                -U_FORTIFY_SOURCE -Wno-ignored-attributes -Wno-shadow)
if(FOREBAY_SANITIZE)
  set(posix_plain -fno-sanitize=all)
endif()
add_library(forebay_posix SHARED
  files/client.cc
  files/identity.cc
  files/key.cc
  files/program_file.cc
  files/table.cc
  posix/change.cc
  posix/change_calls.cc
  posix/entries.cc
  posix/libc.cc
  posix/map_calls.cc
  posix/mapping.cc
  posix/memory.cc
  posix/open_calls.cc
  posix/partial.cc
  posix/place.cc
  posix/read_calls.cc
  posix/start.cc
  posix/start_calls.cc
  posix/stat_calls.cc)
target_include_directories(forebay_posix PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(forebay_posix PRIVATE ${posix_flags} ${posix_plain})
target_link_options(forebay_posix PRIVATE
  ${posix_plain}
  LINKER:-z,defs LINKER:-z,now LINKER:--gc-sections
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/posix/forebay_posix.map)
target_link_libraries(forebay_posix PRIVATE ${CMAKE_DL_LIBS})
# As one unit, so that the path of open() is one piece of code.
set_source_files_properties(posix/entries.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_target_properties(forebay_posix PROPERTIES
  UNITY_BUILD ON
  UNITY_BUILD_BATCH_SIZE 0
  LINKER_LANGUAGE C  # leaves the C++ library out; one that is needed is then an error
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/posix/forebay_posix.map)

if(FOREBAY_TESTS)
  # Programs of the tests are plain, too: a sanitizer wants to be loaded first.
  add_executable(posix_probe EXCLUDE_FROM_ALL posix/probe.cc)
  add_library(posix_early SHARED EXCLUDE_FROM_ALL posix/early.cc)
  foreach(target posix_probe posix_early)
    target_compile_options(${target} PRIVATE ${posix_plain})
    target_link_options(${target} PRIVATE ${posix_plain})
    target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  endforeach()
  add_executable(forebay_posix_test posix/preload_test.cc)
  target_link_libraries(forebay_posix_test PRIVATE forebay_files GTest::gtest GTest::gtest_main)
  add_dependencies(forebay_posix_test forebay_posix posix_probe posix_early)
  target_compile_definitions(forebay_posix_test PRIVATE
    POSIX_LIBRARY="$<TARGET_FILE:forebay_posix>"
    EARLY_LIBRARY="$<TARGET_FILE:posix_early>"
    PROBE="$<TARGET_FILE:posix_probe>")
  if(FOREBAY_PYTHON)
    set_target_properties(forebay_posix_test PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  gtest_discover_tests(forebay_posix_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endif()
