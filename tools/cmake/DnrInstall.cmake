# cmake --install: binary, library, modules, headers, cfgs, digits, man page, completion, pkg-config file. Whatever the
# prefix, nothing holds its path: what is needed is found from where the binary and the library lie. cpack: .deb files.
include(GNUInstallDirs)
set(DNR_SHARE ${CMAKE_INSTALL_DATADIR}/dnnrun)

# ---- the build folder looks like an installed one
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/share/dnnrun)
foreach(name models data tools/compare_torch.py)
    get_filename_component(base ${name} NAME)
    file(CREATE_LINK ${CMAKE_SOURCE_DIR}/${name} ${CMAKE_BINARY_DIR}/share/dnnrun/${base} SYMBOLIC)
endforeach()

# ---- programs and libraries
file(RELATIVE_PATH bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
set_target_properties(dnnrun-tool PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
install(TARGETS dnnrun-tool RUNTIME COMPONENT main)
install(TARGETS dnnrun LIBRARY COMPONENT main)
foreach(name cpu cuda nccl mpi) # mpi is in no package: it would tie all to one MPI
    if(TARGET dnnrun-${name})
        set_target_properties(dnnrun-${name} PROPERTIES INSTALL_RPATH "$ORIGIN/..")
        string(REGEX REPLACE "^cpu$" main component ${name})
        string(REGEX REPLACE "^nccl$" cuda component ${component})
        install(TARGETS dnnrun-${name} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/dnnrun COMPONENT ${component})
    endif()
endforeach()
if(TARGET dnnrun-cuda) # cuDNN lies where pip or the user put it, not where the loader looks
    set_target_properties(dnnrun-cuda PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
endif()
if(TARGET dnnrun-nccl)
    set_target_properties(dnnrun-nccl PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
endif()

# ---- headers: dnnrun.h, and for layers of one's own what runtime/extend.h includes
install(FILES runtime/dnnrun.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT main)
foreach(name extend graph store tensor state status backend model)
    install(FILES runtime/${name}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dnnrun/runtime COMPONENT main)
endforeach()
install(FILES layers/layers.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dnnrun/layers COMPONENT main)
file(RELATIVE_PATH DNR_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" DNR_PC_PREFIX ${DNR_PC_PREFIX})
configure_file(tools/cmake/dnnrun.pc.in dnnrun.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/dnnrun.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT main)

# ---- cfgs, digits, examples, notices
file(GLOB cfgs CONFIGURE_DEPENDS models/*.cfg)
install(FILES ${cfgs} DESTINATION ${DNR_SHARE}/models COMPONENT main)
install(FILES data/digits.tar DESTINATION ${DNR_SHARE}/data COMPONENT main)
install(FILES tools/compare_torch.py tools/scaling.py tools/slurm.sbatch DESTINATION ${DNR_SHARE} COMPONENT main)
install(DIRECTORY tools/examples DESTINATION ${DNR_SHARE} COMPONENT main FILES_MATCHING PATTERN *.c)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT main RENAME copyright)
install(FILES NOTICE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT main)

# ---- man page and bash completion, made of what the tool says of itself
find_package(Python3 COMPONENTS Interpreter QUIET)
dnr_report("man page and completion" "${Python3_FOUND}" "made from --help" "${DNR_APT} python3")
if(Python3_FOUND)
    set(made ${CMAKE_BINARY_DIR}/share/dnnrun.1 ${CMAKE_BINARY_DIR}/share/dnnrun.bash)
    add_custom_command(OUTPUT ${made}
        COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/make_man.py $<TARGET_FILE:dnnrun-tool> ${made}
        DEPENDS dnnrun-tool tools/make_man.py VERBATIM)
    add_custom_target(dnnrun-man ALL DEPENDS ${made})
    install(FILES ${CMAKE_BINARY_DIR}/share/dnnrun.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT main)
    install(FILES ${CMAKE_BINARY_DIR}/share/dnnrun.bash
            DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT main RENAME dnnrun)
endif()

# ---- packages: dnnrun for any machine; dnnrun-cuda, where it is built, for one with CUDA and cuDNN, which Debian has not
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME dnnrun)
set(CPACK_PACKAGE_CONTACT "the dnnrun authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "trains residual networks (ResNets) on pictures")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_COMPONENTS_ALL main)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_MAIN_PACKAGE_NAME dnnrun)
set(CPACK_DEBIAN_MAIN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
if(TARGET dnnrun-cuda)
    list(APPEND CPACK_COMPONENTS_ALL cuda)
    set(CPACK_DEBIAN_CUDA_PACKAGE_NAME dnnrun-cuda)
    set(CPACK_DEBIAN_CUDA_PACKAGE_DEPENDS "dnnrun (= ${PROJECT_VERSION})")
    set(CPACK_DEBIAN_CUDA_DESCRIPTION "dnnrun's module for NVIDIA GPUs: needs a driver, cuDNN 9 and cuBLAS")
endif()
include(CPack)
