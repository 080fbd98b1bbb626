/* cmd_version.c: dnnrun version. */
#include "config.h"

#include <jansson.h>

static const char help[] =
    "dnnrun version: versions of dnnrun, its libraries and back ends.\n"
    "\n"
    "  dnnrun version       for a bug report\n"
    "  dnnrun --version     one line\n"
    "\n"
    "Each back end has one line: the device and its libraries, or why it cannot be used.\n";

static dnr_status no_arguments(const tool_args *a, const char *command, dnr_error *err)
{
    if (!a->cfg)
        return DNR_OK;
    tool_fail(err, DNR_EUSAGE, "command line", "%s takes no arguments, but %.200s was given",
              command, a->cfg);
    return tool_remedy(err, "leave it out");
}

dnr_status cmd_version(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, 0, &a, err));
    if (a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, no_arguments(&a, "version", err));
    printf("dnnrun %s\n", dnr_version());
#ifdef __clang__
    printf("built with clang %s\n", __clang_version__);
#else
    printf("built with gcc %s\n", __VERSION__);
#endif
    printf("jansson %s\n", JANSSON_VERSION);
    dnr_device_list(stdout);
out:
    return st;
}

/* docs/cfg.md on stdout; a test compares it with the committed file. */
dnr_status cmd_config_doc(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, 0, &a, err));
    if (a.help) {
        puts("dnnrun config-doc: docs/cfg.md, made from the table of keys.");
        return DNR_OK;
    }
    TOOL_TRY(st, no_arguments(&a, "config-doc", err));
    cfg_write_doc(stdout);
out:
    return st;
}
