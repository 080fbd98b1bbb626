/* embedded.h: what the report page is made of, as it was when the tool was built. */
#ifndef EMBEDDED_H
#define EMBEDDED_H

/* Each ends with a 0. */
extern const char embedded_report_html[]; /* tools/report.html */
extern const char embedded_chart_js[];    /* Chart.js; empty where the build did not find it */

#endif
