# Flags shared by all targets, and dnr_module().
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O3 -g")
if(DNR_SANITIZE) # gcc takes a minute and a half for winograd.c at -O3 with both sanitizers, 3 s at -O1
    set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O1 -g")
endif()
# Binary, library and modules lie together in the build folder, as they do when installed.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})

add_library(dnr_flags INTERFACE)
target_compile_definitions(dnr_flags INTERFACE _GNU_SOURCE)
# Errors tell their place from the source folder on, "runtime/plan.c:212", wherever that lies; ccache may make paths relative.
file(RELATIVE_PATH DNR_SRC_RELATIVE ${CMAKE_BINARY_DIR} ${CMAKE_SOURCE_DIR})
target_compile_options(dnr_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:C>:-fmacro-prefix-map=${DNR_SRC_RELATIVE}=;-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=>")
# Ops carry their layers' attributes as raw bytes, read through the layer's own type: hence no strict aliasing.
target_compile_options(dnr_flags INTERFACE
    $<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wstrict-prototypes;-Wno-unused-parameter;$<$<C_COMPILER_ID:GNU>:-Wno-format-truncation>;$<$<C_COMPILER_ID:Clang>:-Wno-pass-failed>;-Werror;-fno-math-errno;-fno-strict-aliasing>)
if(DNR_SANITIZE)
    target_compile_options(dnr_flags INTERFACE
        $<$<COMPILE_LANGUAGE:C>:-fsanitize=${DNR_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>)
    target_link_options(dnr_flags INTERFACE -fsanitize=${DNR_SANITIZE})
endif()

# A back end: dnnrun-NAME.so, loaded by libdnnrun from its own folder.
function(dnr_module name)
    add_library(dnnrun-${name} MODULE ${ARGN})
    set_target_properties(dnnrun-${name} PROPERTIES PREFIX "")
    target_link_libraries(dnnrun-${name} PRIVATE dnnrun dnr_flags dnr_hash)
endfunction()
