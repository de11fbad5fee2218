# One target a folder: forebay_folder(io DEPENDS base metrics) makes forebay_io from src/io/*.cc and,
# with FOREBAY_TESTS, forebay_io_test from src/io/*_test.cc. PROGRAM name: src/io/name.cc is a program
# of its own. SEQUENTIAL regex: tests of code without threads, which the thread sanitizer has no use for
# (tests/check_includes.py sees that it has none).
if(FOREBAY_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

# With FOREBAY_PCH the standard library is parsed once for all folders, and once with GTest for all
# tests: a quarter of what the builds of `make test` take. Those without it (users', the fuzzers') see
# that each file includes what it uses.
if(FOREBAY_PCH)
  set(FOREBAY_PCH_HEADERS <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint>
      <deque> <functional> <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread>
      <unordered_map> <variant> <vector>)
endif()
function(forebay_precompile FOLDER FIRST)
  if(NOT FOREBAY_PCH)
    return()
  endif()
  if(NOT FOLDER STREQUAL FIRST)
    target_precompile_headers(${FOLDER} REUSE_FROM ${FIRST})
  else()
    target_precompile_headers(${FOLDER} PRIVATE ${FOREBAY_PCH_HEADERS} ${ARGN})
  endif()
endfunction()

function(forebay_folder NAME)
  cmake_parse_arguments(ARG "" "PROGRAM;SEQUENTIAL" "DEPENDS;LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${NAME}/*.cc)
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  if(ARG_PROGRAM)
    list(FILTER sources EXCLUDE REGEX "/${ARG_PROGRAM}\\.cc$")
  endif()
  list(TRANSFORM ARG_DEPENDS PREPEND forebay_)
  if(sources)
    add_library(forebay_${NAME} STATIC ${sources})
    target_include_directories(forebay_${NAME} PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
    target_link_libraries(forebay_${NAME} PUBLIC ${ARG_DEPENDS} ${ARG_LIBS} Threads::Threads)
    forebay_precompile(forebay_${NAME} forebay_base)
  else()
    add_library(forebay_${NAME} INTERFACE)
    target_include_directories(forebay_${NAME} INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
    target_link_libraries(forebay_${NAME} INTERFACE ${ARG_DEPENDS} ${ARG_LIBS} Threads::Threads)
  endif()
  if(ARG_SEQUENTIAL AND FOREBAY_SANITIZE MATCHES "thread")
    list(FILTER tests EXCLUDE REGEX "/${ARG_SEQUENTIAL}\\.cc$")
  endif()
  if(ARG_PROGRAM)
    add_executable(${ARG_PROGRAM} ${CMAKE_SOURCE_DIR}/src/${NAME}/${ARG_PROGRAM}.cc)
    target_link_libraries(${ARG_PROGRAM} PRIVATE forebay_${NAME})
  endif()
  if(FOREBAY_TESTS AND tests)
    # The package's build has them only where they are asked for by name.
    if(FOREBAY_PYTHON)
      add_executable(forebay_${NAME}_test EXCLUDE_FROM_ALL ${tests})
    else()
      add_executable(forebay_${NAME}_test ${tests})
    endif()
    if(NOT FOREBAY_SANITIZE)
      target_compile_options(forebay_${NAME}_test PRIVATE -O2)  # builds sooner than -O3
    endif()
    target_link_libraries(forebay_${NAME}_test PRIVATE forebay_${NAME} GTest::gtest GTest::gtest_main)
    # With precompiled headers g++ 12 warns of the standard library's own code.
    if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
      forebay_precompile(forebay_${NAME}_test forebay_base_test <gtest/gtest.h>)
    endif()
    gtest_discover_tests(forebay_${NAME}_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
  endif()
endfunction()
