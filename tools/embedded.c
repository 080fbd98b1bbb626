/* embedded.c: files as byte arrays, by the assembler. CMake names them; an empty file stands for one that is missing. */
#include "embedded.h"

#define EMBED(symbol, path)                                                                        \
    __asm__(".pushsection .rodata\n"                                                               \
            ".globl " #symbol "\n"                                                                 \
            ".hidden " #symbol "\n"                                                                \
            ".type " #symbol ", @object\n" #symbol ":\n"                                           \
            ".incbin \"" path "\"\n"                                                               \
            ".byte 0\n"                                                                            \
            ".size " #symbol ", . - " #symbol "\n"                                                 \
            ".popsection\n")

EMBED(embedded_report_html, DNR_REPORT_HTML);
EMBED(embedded_chart_js, DNR_CHART_JS);
