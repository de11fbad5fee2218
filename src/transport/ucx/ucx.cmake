# libforebay_ucx.so: UCX in a library of its own, loaded when a transport is made (ucx_load.cc), so
# that nothing else needs UCX.
if(FOREBAY_HAVE_UCX)
  add_library(forebay_ucx MODULE transport/ucx/ucx_config.cc transport/ucx/ucx_transport.cc
                                 transport/socket_address.cc)
  target_include_directories(forebay_ucx PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(forebay_ucx PRIVATE forebay_base PkgConfig::UCX_PC Threads::Threads)
  add_library(forebay_ucx_first MODULE transport/ucx/ucx_first.cc)
  target_link_libraries(forebay_ucx_first PRIVATE ucm)
  target_include_directories(forebay_ucx_first SYSTEM PRIVATE ${UCX_PC_INCLUDE_DIRS})
  target_link_directories(forebay_ucx_first PRIVATE ${UCX_PC_LIBRARY_DIRS})
  add_dependencies(forebay_ucx forebay_ucx_first)
  # UCX's own headers do not follow our warnings.
  target_include_directories(forebay_ucx SYSTEM PRIVATE ${UCX_PC_INCLUDE_DIRS})
  foreach(target forebay_transport_test forebay_peer_test)
    if(TARGET ${target})
      add_dependencies(${target} forebay_ucx)
    endif()
  endforeach()
endif()
