"""What Prometheus is told of one server.

    the loop's thread                                    the exporter's thread
    recorder.Metrics ──► instruments (plain numbers) ◄── collector.Collector ◄── exporter.MetricsExporter ◄── scraper
                         totals, stats of the parts  ◄──┘

What the loop notes costs it a few additions and no lock (0.3 µs for each output of a step, as measured); what a scrape
costs (1 ms) is paid by a thread of its own. Names and units follow Prometheus's conventions: base units, `_total` on
what only grows, the prefix `emberline_`. Labels are closed sets (places of engines, states, causes, status codes):
never what a caller sent.
"""
