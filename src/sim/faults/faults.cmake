# The fault simulator: the product's own engine, peers and membership on a virtual clock. Its own
# clock, timers and sockets (substitutes.cc) come before those of the libraries, and so do its own
# copies of the files that bugs can be planted in. Nothing of it is in the package.
set(FAULT_FILES cluster.cc network.cc schedule.cc sim_source.cc substitutes.cc world.cc)
list(TRANSFORM FAULT_FILES PREPEND sim/faults/)
add_library(forebay_faults OBJECT EXCLUDE_FROM_ALL ${FAULT_FILES} core/directory.cc peer/exchange.cc peer/node_serving.cc)
target_include_directories(forebay_faults PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_definitions(forebay_faults PUBLIC FOREBAY_PLANTED_BUGS)
target_link_libraries(forebay_faults PUBLIC forebay_peer)
add_executable(forebay-faultsim EXCLUDE_FROM_ALL sim/faults/forebay-faultsim.cc)
target_link_libraries(forebay-faultsim PRIVATE forebay_faults)
if(FOREBAY_PYTHON)
  add_executable(forebay_faults_test EXCLUDE_FROM_ALL sim/faults/faults_test.cc)
else()
  add_executable(forebay_faults_test sim/faults/faults_test.cc)
endif()
target_link_libraries(forebay_faults_test PRIVATE forebay_faults GTest::gtest GTest::gtest_main)
gtest_discover_tests(forebay_faults_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
